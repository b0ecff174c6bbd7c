"""Running what torch.compile would compile as it is."""

import sys
from contextlib import AbstractContextManager, nullcontext

import torch


def eagerly() -> AbstractContextManager:
    """Let compiled functions run as they were written, without compiling.

    Returns:
        AbstractContextManager: In which they do.
    """
    # Nothing is compiled where nobody has asked for it, and the import would take a second.
    return torch.compiler.set_stance('force_eager') if 'torch._dynamo' in sys.modules else nullcontext()
