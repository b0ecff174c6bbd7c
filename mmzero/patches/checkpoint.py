"""Recomputing one module's activations in backward, non-re-entrant, without changing the module tree."""

import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

Undo = Callable[[], None]


def checkpoint_module(module: nn.Module) -> Undo:
    """Make a module drop its activations after forward and recompute them in backward.

    Stands on ``torch.utils.checkpoint.checkpoint(use_reentrant=False)``: the random state of the forward is
    used again (dropout), keyword arguments pass, and the recompute sees the same autocast state. Only
    ``forward`` on this instance is replaced, by a bound method, so that names, class, hooks and a deep copy
    (which runs its own weights) stay as they were.

    Memory: the module keeps its inputs instead of its activations. Cost: one more forward of the module.

    Args:
        module (nn.Module): The module.

    Returns:
        Callable[[], None]: Takes the change back.

    Raises:
        ValueError: If ``forward`` of this instance was replaced already.
    """
    if type(module).forward is nn.Module.forward:
        raise ValueError(f'a {type(module).__name__} has no forward of its own; name the modules in it')
    if 'forward' in vars(module):
        raise ValueError(f'forward of this {type(module).__name__} was replaced on the instance already')
    module.forward = types.MethodType(_recomputed_forward, module)

    def undo() -> None:
        del module.forward

    return undo


def _recomputed_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # Looked up at each call: fully_shard replaces the class of an instance later on.
    forward = types.MethodType(type(self).forward, self)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: _contexts(self), **kwargs)


def _contexts(module: nn.Module) -> tuple[AbstractContextManager, AbstractContextManager]:
    return nullcontext(), _keep_running_statistics(module)


@contextmanager
def _keep_running_statistics(module: nn.Module) -> Iterator[None]:
    """Let norms with running statistics count a batch once: the recompute updates copies.

    The copies stand in the originals' places because torch keeps them for backward, and a recompute has to keep
    what the forward kept.
    """
    kept = [
        (layer._buffers, name, layer._buffers[name])
        for layer in module.modules()
        if isinstance(layer, _NormBase) and layer.training
        for name in ('running_mean', 'running_var', 'num_batches_tracked')
    ]
    for buffers, name, tensor in kept:
        buffers[name] = None if tensor is None else tensor.clone()
    try:
        yield
    finally:
        for buffers, name, tensor in kept:
            buffers[name] = tensor
