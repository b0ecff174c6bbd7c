"""mmdet's SyncNormHook with a sharded model: what ranks average is what differs between them."""

from typing import Any

from mmengine.dist import all_reduce_params
from mmengine.hooks import Hook
from torch.nn.modules.batchnorm import _NormBase


def is_sync_norm(hook: Hook) -> bool:
    """Say whether a hook is mmdet's SyncNormHook, or derived from it.

    Args:
        hook (Hook): A hook that was built.

    Returns:
        bool: Whether it is.
    """
    return _sync_norm_class(hook) is not None


def average_statistics(hook: Hook) -> None:
    """Let a SyncNormHook average the running statistics of norm layers before val, and nothing else.

    By itself it averages their whole state, in one tensor: weights, which are the same on every rank, too, and which
    are shards that no plain tensor can be joined with. What a derived class does around it stays.

    Args:
        hook (Hook): One that was built; it is changed.
    """
    base: Any = _sync_norm_class(hook)
    if base is None or isinstance(hook, _Marked):
        return
    averaging = type(base.__name__, (_Marked, base), {'before_val_epoch': _before_val_epoch})
    kind: Any = type(hook)
    hook.__class__ = averaging if kind is base else type(kind.__name__, (kind, averaging), {})


class _Marked:
    """A hook that averages statistics already."""


def _sync_norm_class(hook: Hook) -> type | None:
    return next((cls for cls in type(hook).__mro__ if cls.__name__ == 'SyncNormHook'), None)


def _before_val_epoch(self: Hook, runner: Any) -> None:
    """Average running statistics over all ranks. Collective."""
    norms = [module for module in runner.sharded.module.modules() if isinstance(module, _NormBase)]
    all_reduce_params([buffer for norm in norms for buffer in norm.buffers(recurse=False)], op='mean')
