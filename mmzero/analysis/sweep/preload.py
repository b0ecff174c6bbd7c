"""What the processes of a sweep need, imported once by the server that they are forked from."""

import contextlib
import importlib

from mmzero.analysis.sweep import ranks  # noqa: F401
from mmzero.analysis.sweep.models import PACKAGES

for package in PACKAGES:
    # What is not installed, or fails, is for the process that needs it to say.
    with contextlib.suppress(Exception):
        importlib.import_module(f'{package}.models')
