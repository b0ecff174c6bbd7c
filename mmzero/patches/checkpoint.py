"""Recomputing one module's activations in backward, non-re-entrant, without changing the module tree."""

import types
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from mmzero.config import CheckpointingConfig
from mmzero.patches.offload import OffloadToHost, bytes_of
from mmzero.patches.patch import CheckpointPatch, Undo
from mmzero.patches.selective import keeping_matmuls, out_of_place

Observe = Callable[[list[Tensor]], tuple[AbstractContextManager, AbstractContextManager]]

DEFAULT = CheckpointingConfig()


class Region:
    """How one module is recomputed.

    Args:
        module (nn.Module): The module.
        config (CheckpointingConfig): What is kept, and where.
        patch (CheckpointPatch): What its class says.
        host (OffloadToHost): Takes what is offloaded.

    Attributes:
        active (bool): Whether it is recomputed at the moment; else it keeps its activations.
        has_run (bool): Whether a forward with gradients has come to it.
        largest (int, optional): Where it is not active: bytes of tensors beyond which a call is recomputed anyway.
        has_outgrown (bool): Whether one was.
        communicates (bool): Whether norms in it compute with those of other ranks, so that a recompute needs them, too.
        observe (Callable, optional): From the tensors that the module gets to contexts for a forward that is
            recomputed, and for its recompute.
        see_selected (Callable, optional): Is given the outputs that ``save='matmuls'`` keeps.
        compiled (Callable, optional): Takes the place of the class's forward wherever the region itself is not
            compiled, as where a graph break cuts it: torch compiles nothing by itself within a checkpoint.
    """

    def __init__(
        self, module: nn.Module, config: CheckpointingConfig, patch: CheckpointPatch, host: OffloadToHost
    ) -> None:
        self.config = config
        self.patch = patch
        self.host = host
        self.active = True
        self.has_run = False
        self.largest: int | None = None
        self.has_outgrown = False
        self.observe: Observe | None = None
        self.see_selected: Callable[[Any], None] | None = None
        self.compiled: Callable | None = None
        self.communicates = any('SyncBatchNorm' in type(layer).__name__ for layer in module.modules())
        self._has_norms = any(isinstance(layer, _NormBase) for layer in module.modules())

    def run(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], method: str = 'forward') -> Any:
        """Run the module's forward.

        Args:
            module (nn.Module): The module, or a deep copy of it.
            args (tuple): Positional arguments.
            kwargs (dict): Keyword arguments.
            method (str): What to run. Defaults to 'forward'.

        Returns:
            Any: What forward returns.
        """
        # Looked up at each call: fully_shard replaces the class of an instance later on.
        forward = partial(getattr(type(module), method), module)
        if self.compiled is not None and method == 'forward' and not torch.compiler.is_compiling():
            forward = partial(self.compiled, module)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        self.has_run = True
        if not self.active and not self._outgrows(args, kwargs):
            return forward(*args, **kwargs)
        offloading = self.host.saving() if self.config.offload else nullcontext()
        if self.config.save == 'all':
            with offloading:
                return forward(*args, **kwargs)
        args, kwargs = self.patch.arguments(module, args, kwargs)
        # As one list, so that tensors in keyword arguments and containers are saved as autograd saves tensors.
        flat, spec = tree_flatten((args, kwargs))
        # The first time as it was called, so that what forward puts into a container of its caller's stays there. A
        # compiler calls once for both; where a graph break leaves the rest to be called, it has seen this already.
        first = [] if torch.compiler.is_compiling() else [(args, kwargs)]
        calls: list[None] = []

        def run(*flat: Any) -> Any:
            args, kwargs = first.pop() if first else tree_unflatten(list(flat), spec)
            if torch.compiler.is_compiling():
                return forward(*args, **kwargs)
            is_again = bool(calls)
            calls.append(None)
            with self._recomputing(module) if is_again else nullcontext():
                return forward(*args, **kwargs)

        # Held by autograd alone, which may put inputs elsewhere.
        del args, kwargs
        with offloading:
            return checkpoint(
                run,
                *flat,
                use_reentrant=False,
                preserve_rng_state=self.config.preserve_rng_state,
                determinism_check='default' if self.config.determinism_check else 'none',
                debug=self.config.debug,
                early_stop=self.config.early_stop,
                **self._contexts(flat),
            )

    def _outgrows(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        if self.largest is None:
            return False
        got = sum(bytes_of(item) for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor))
        self.has_outgrown |= got > self.largest
        return got > self.largest

    def _recomputing(self, module: nn.Module) -> AbstractContextManager:
        return _KeptStatistics(module) if self._has_norms else nullcontext()

    def _contexts(self, flat: list) -> dict[str, Any]:
        """What forward and recompute run in; nothing where it may be, since torch's ``debug`` brings its own.

        A compiler takes but the contexts of ``save='matmuls'``.
        """
        observe = None if torch.compiler.is_compiling() else self.observe
        if self.config.save == 'matmuls' and observe is None:
            return dict(context_fn=keeping_matmuls)
        if observe is None:
            return {}
        contexts = [observe([item for item in flat if isinstance(item, Tensor)])]
        if self.config.save == 'matmuls':
            contexts.append(keeping_matmuls(self.see_selected))
        forward, recompute = (_All(each) for each in zip(*contexts, strict=True))
        return dict(context_fn=lambda: (forward, recompute))


class _All(AbstractContextManager):
    """Several contexts as one."""

    def __init__(self, contexts: Iterable[AbstractContextManager]) -> None:
        self._contexts = tuple(contexts)
        self._stack = ExitStack()

    def __enter__(self) -> None:
        for context in self._contexts:
            self._stack.enter_context(context)

    def __exit__(self, *details: Any) -> bool | None:
        return self._stack.__exit__(*details)


class _KeptStatistics(AbstractContextManager):
    """Let norms with running statistics count a batch once: the recompute updates copies.

    The copies stand in the originals' places because torch keeps them for backward, and a recompute has to keep
    what the forward kept.

    Args:
        module (nn.Module): What is recomputed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __enter__(self) -> None:
        self._kept = [
            (layer._buffers, name, layer._buffers[name])
            for layer in self._module.modules()
            if isinstance(layer, _NormBase) and layer.training
            for name in ('running_mean', 'running_var', 'num_batches_tracked')
        ]
        for buffers, name, tensor in self._kept:
            buffers[name] = None if tensor is None else tensor.clone()

    def __exit__(self, *details: Any) -> None:
        for buffers, name, tensor in self._kept:
            buffers[name] = tensor


def checkpoint_module(
    module: nn.Module,
    config: CheckpointingConfig = DEFAULT,
    *,
    patch: CheckpointPatch | None = None,
    host: OffloadToHost | None = None,
) -> tuple[Region, Undo]:
    """Make a module drop its activations after forward and recompute them in backward.

    Stands on ``torch.utils.checkpoint.checkpoint(use_reentrant=False)``: the random state of the forward is
    used again (dropout), keyword arguments pass, and the recompute sees the same autocast state. Only
    ``forward`` on this instance is replaced, by a bound method, so that names, class, hooks and a deep copy
    (which runs its own weights) stay as they were. Activations in it no longer write in place.

    Memory: the module keeps its inputs instead of its activations. Cost: one more forward of the module.

    Args:
        module (nn.Module): The module.
        config (CheckpointingConfig): What is kept, and where; its ``modules`` and ``policy`` are not looked at.
        patch (CheckpointPatch, optional): What its class says. Defaults to None: nothing.
        host (OffloadToHost, optional): Takes what is offloaded. Defaults to None: one of its own.

    Returns:
        tuple[Region, Callable[[], None]]: How it is recomputed, and what takes the change back.

    Raises:
        ValueError: If ``forward`` of this instance was replaced already.
    """
    if type(module).forward is nn.Module.forward:
        raise ValueError(f'a {type(module).__name__} has no forward of its own; name the modules in it')
    if 'forward' in vars(module):
        raise ValueError(f'forward of this {type(module).__name__} was replaced on the instance already')
    region = Region(module, config, patch or CheckpointPatch(), host or OffloadToHost())

    methods = ('forward', *(name for name in region.patch.methods if hasattr(type(module), name)))
    for name in methods:
        setattr(module, name, types.MethodType(_through(region, name), module))
    undos = [] if config.save == 'all' else out_of_place(module)

    def undo() -> None:
        for name in methods:
            delattr(module, name)
        for undo in undos:
            undo()

    return region, undo


def _through(region: Region, method: str) -> Callable:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return region.run(self, args, kwargs, method)

    return forward
