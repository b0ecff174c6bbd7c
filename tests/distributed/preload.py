"""What ranks of tests need, imported once by the server that they are forked from: half of the time of a small test."""

import contextlib
import importlib

for name in ('torch.distributed.fsdp', 'mmengine.runner', 'mmzero', 'tests.models', 'mmdet.models', 'mmengine.testing'):
    # What is missing, or fails, is for the rank that needs it to say.
    with contextlib.suppress(Exception):
        importlib.import_module(name)
