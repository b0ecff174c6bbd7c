"""Recomputing one module's activations in backward, non-re-entrant, without changing the module tree."""

import types
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from mmzero.config import CheckpointingConfig
from mmzero.patches.offload import OffloadToHost
from mmzero.patches.patch import CheckpointPatch, Undo
from mmzero.patches.selective import keeping_matmuls, out_of_place


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
        observe (Callable, optional): Given the tensors that the module gets, returns a context for its forward.
    """

    def __init__(
        self, module: nn.Module, config: CheckpointingConfig, patch: CheckpointPatch, host: OffloadToHost
    ) -> None:
        self.config = config
        self.patch = patch
        self.host = host
        self.active = True
        self.has_run = False
        self.observe: Callable[[list[Tensor]], AbstractContextManager] | None = None
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
        forward = types.MethodType(getattr(type(module), method), module)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        self.has_run = True
        if not self.active:
            return forward(*args, **kwargs)
        offloading = self.host.saving() if self.config.offload else nullcontext()
        if self.config.save == 'all':
            with offloading:
                return forward(*args, **kwargs)
        args, kwargs = self.patch.arguments(module, args, kwargs)
        # As one list, so that tensors in keyword arguments and containers are saved as autograd saves tensors.
        flat, spec = tree_flatten((args, kwargs))

        def run(*flat: Any) -> Any:
            args, kwargs = tree_unflatten(list(flat), spec)
            return forward(*args, **kwargs)

        options: dict[str, Any] = {}
        if self._has_norms or self.config.save != 'inputs' or self.observe is not None:
            tensors = [item for item in flat if isinstance(item, Tensor)]
            # Only where it is needed: torch.compile takes a function of its own alone.
            options['context_fn'] = lambda: self._contexts(module, tensors)
        with offloading:
            return checkpoint(
                run,
                *flat,
                use_reentrant=False,
                preserve_rng_state=self.config.preserve_rng_state,
                determinism_check='default' if self.config.determinism_check else 'none',
                debug=self.config.debug,
                early_stop=self.config.early_stop,
                **options,
            )

    def _contexts(self, module: nn.Module, tensors: list[Tensor]) -> tuple[AbstractContextManager, ...]:
        forward, recompute = [], []
        if self.observe is not None:
            forward.append(self.observe(tensors))
        if self.config.save == 'matmuls':
            keeping, using = keeping_matmuls()
            forward.append(keeping)
            recompute.append(using)
        if self._has_norms:
            recompute.append(_KeptStatistics(module))
        return _All(forward), _All(recompute)


class _All(AbstractContextManager):
    """Several contexts as one; entered again where a graph is run backward again."""

    def __init__(self, contexts: Iterable[AbstractContextManager]) -> None:
        self._contexts = tuple(contexts)
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack = ExitStack()
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
    config: CheckpointingConfig = CheckpointingConfig(),
    *,
    patch: CheckpointPatch | None = None,
    host: OffloadToHost | None = None,
) -> tuple[Region, Undo]:
    """Make a module drop its activations after forward and recompute them in backward.

    Stands on ``torch.utils.checkpoint.checkpoint(use_reentrant=False)``: the random state of the forward is
    used again (dropout), keyword arguments pass, and the recompute sees the same autocast state. Only
    ``forward`` on this instance is replaced, by a bound method, so that names, class, hooks and a deep copy
    (which runs its own weights) stay as they were.

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
    undos = out_of_place(module) if config.save == 'matmuls' else []

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
