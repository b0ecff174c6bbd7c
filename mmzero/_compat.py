"""The only place for version checks and private imports, each with the condition that removes it."""

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mmengine.runner.checkpoint
import numpy as np
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build modules whose parameters go to the meta device as they are registered; buffers stay real.

    ``torch.device('meta')`` would take everything, and models that read values while they are built (Swin calls
    ``.item()`` on a linspace) fail under it. Remove once torch offers this for parameters alone.

    Yields:
        None: Modules built inside have no parameter storage.
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta:
            meta = nn.Parameter(param.detach().to('meta'), requires_grad=param.requires_grad)
            meta.__dict__.update(vars(param))
            self._parameters[name] = meta

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def alone_in_checkpoint_io() -> Iterator[None]:
    """Let one rank read a checkpoint by itself.

    MMEngine's loaders of URLs wait for all ranks at a barrier, since there every rank reads. Remove once
    MMEngine has a loader without it.

    Yields:
        None: Inside, MMEngine's checkpoint loaders take this process for the only one.
    """
    module = mmengine.runner.checkpoint
    get_dist_info = module.get_dist_info
    module.get_dist_info = lambda group=None: (0, 1)
    try:
        yield
    finally:
        module.get_dist_info = get_dist_info


def set_reduce_scatter_unused_params(root: nn.Module) -> bool:
    """Let ranks that did not use a parameter reduce zeros for it (FSDPModule, torch >= 2.13).

    Args:
        root (nn.Module): The sharded model.

    Returns:
        bool: Whether this torch has it. Remove once the floor is torch 2.13.
    """
    setter = getattr(root, 'set_reduce_scatter_unused_params', None)
    if setter is None:
        return False
    setter(True)
    return True


def numpy_pickle_globals() -> tuple:
    """Functions and dtype classes by which numpy arrays and numbers are unpickled.

    They moved from ``numpy.core`` to ``numpy._core`` in numpy 2, and files name either. Remove once checkpoints
    of MMEngine hold no numpy objects.

    Returns:
        tuple: Entries for ``torch.serialization.safe_globals``.
    """
    multiarray = importlib.import_module(f'{"numpy._core" if hasattr(np, "_core") else "numpy.core"}.multiarray')
    found: list = []
    for name in ('_reconstruct', 'scalar'):
        for package in ('numpy._core', 'numpy.core'):
            found.append((getattr(multiarray, name), f'{package}.multiarray.{name}'))
    kinds = ('Float64', 'Float32', 'Int64', 'Int32', 'Bool')
    found += [getattr(np.dtypes, f'{kind}DType') for kind in kinds]
    return tuple(found)


def ddp_buffer_arguments(sync: bool) -> dict[str, Any]:
    """Name DDP's switch for broadcasting buffers before each forward.

    torch 2.13 renames ``broadcast_buffers`` to ``forward_sync_buffers`` and warns of the old name. Remove once the
    floor is torch 2.13.

    Args:
        sync (bool): Whether to broadcast them.

    Returns:
        dict[str, Any]: A keyword argument of DistributedDataParallel.
    """
    known = inspect.signature(DistributedDataParallel).parameters
    return {'forward_sync_buffers' if 'forward_sync_buffers' in known else 'broadcast_buffers': sync}
