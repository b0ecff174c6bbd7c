"""What an optimizer sees of sharded parameters for the time of its step.

[Note: views of parameters]
Between steps the optimizer's groups list the model's own parameters, and its state holds shards (DTensors) of what has
a parameter's shape: what is saved, scheduled, clipped and shown does not depend on how a step is taken. For the time of
``optimizer.step()`` a view puts another tensor in each parameter's place, with its gradient and its state:

- :class:`Held`: the plain tensor that this rank holds. For optimizers that treat each element by itself. torch's
  foreach and fused kernels take shards and whole parameters together then, as plain CUDA tensors, and DTensor's
  dispatch, which knows neither all kernels nor a mixture, is not asked.
- :class:`Shards`: the DTensor, with whole parameters as replicated ones. For optimizers with norms, whose operations
  DTensor computes over all ranks.
- :class:`OneByOne`: the whole tensor, one parameter after the other. For optimizers that need it: matrices that are
  orthogonalised or factored, blocks that are quantised.

A view's tensors share memory with the parameter's where they can; where not, they are written back.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from mmzero._compat import dtensor_as_it_is, local_tensor
from mmzero.engines.on_host import device_of, part_of, whole_of


class View(ABC):
    """How an optimizer is shown parameters."""

    name: str
    costs = ''
    """What a user may not expect of it, for the log."""

    def step(self, optimizer: Optimizer, **kwargs: Any) -> None:
        """Step the optimizer on what the view shows. Collective where the view or the optimizer communicates.

        Args:
            optimizer (Optimizer): The optimizer on sharded parameters.
            **kwargs: As ``torch.optim.Optimizer.step``.
        """
        with self._shown(optimizer, [param for group in optimizer.param_groups for param in group['params']]):
            optimizer.step(**kwargs)

    @contextmanager
    def _shown(self, optimizer: Optimizer, params: Iterable[nn.Parameter]) -> Iterator[None]:
        """Put what the view shows in the place of some parameters, and nothing in that of the others."""
        groups, state = optimizer.param_groups, optimizer.state
        lists = [group['params'] for group in groups]
        with torch.no_grad():
            shown = {param: self._twin(param) for param in params}
            kept = dict(state)
            for param, twin in shown.items():
                if param in kept:
                    state[twin] = {key: self._show_state(value, param) for key, value in state.pop(param).items()}
        for group, own in zip(groups, lists, strict=True):
            group['params'] = [shown[param] for param in own if param in shown]
        try:
            yield
        finally:
            for group, own in zip(groups, lists, strict=True):
                group['params'] = own
            with torch.no_grad():
                for param, twin in shown.items():
                    self._take_back(param, twin)
                    if twin in state:
                        kept[param] = {
                            key: self.hide(value, param) if isinstance(value, Tensor) else value
                            for key, value in state.pop(twin).items()
                        }
            # In its order, in which it may be saved.
            kept.update(state)
            state.clear()
            state.update(kept)

    def _twin(self, param: nn.Parameter) -> nn.Parameter:
        twin = nn.Parameter(self.show(param, param), param.requires_grad)
        if param.grad is not None:
            twin.grad = self.show(param.grad, param)
        return twin

    def _show_state(self, value: Any, param: nn.Parameter) -> Any:
        return self.show(value, param) if isinstance(value, Tensor) else value

    def _take_back(self, param: nn.Parameter, twin: nn.Parameter) -> None:  # noqa: B027
        """Write into a parameter what became of its twin, where they share no memory."""

    @abstractmethod
    def show(self, tensor: Tensor, param: nn.Parameter) -> Tensor:
        """Make what the optimizer sees of a parameter, its gradient, or a tensor of its state."""

    @abstractmethod
    def hide(self, value: Tensor, param: nn.Parameter) -> Tensor:
        """Make what is kept of a tensor of the optimizer's state."""


@dataclass
class _Known:
    """A sharded parameter, this rank's part of it, and for the time of a step its state and the parts of that."""

    param: nn.Parameter
    local: Tensor
    twin: nn.Parameter
    state: dict[str, Any] = field(default_factory=dict)
    shown: dict[str, Any] = field(default_factory=dict)


class Held(View):
    """Shows the plain tensors that this rank holds. No communication.

    Twins are made once: a model may have thousands of parameters, and a step should ask Python for little.
    """

    name = 'shards as plain tensors'

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    @override
    @contextmanager
    def _shown(self, optimizer: Optimizer, params: Iterable[nn.Parameter]) -> Iterator[None]:
        groups, state = optimizer.param_groups, optimizer.state
        lists = [group['params'] for group in groups]
        with torch.no_grad():
            for group, own in zip(groups, lists, strict=True):
                group['params'] = [self._show(p, state) if isinstance(p, DTensor) else p for p in own]
        try:
            yield
        finally:
            for group, own in zip(groups, lists, strict=True):
                group['params'] = own
            for own in lists:
                for param in own:
                    if isinstance(param, DTensor):
                        self._hide(param, state)

    def _show(self, param: Any, state: dict) -> nn.Parameter:
        local, grad = local_tensor(param), param.grad
        known = self._known.get(id(param))
        if known is None or known.local is not local:
            known = self._known[id(param)] = _Known(param, local, nn.Parameter(local, param.requires_grad))
        twin = known.twin
        if twin.requires_grad is not param.requires_grad:
            twin.requires_grad_(param.requires_grad)
        twin.grad = None if grad is None else local_tensor(grad)
        entries = state.pop(param, None)
        if entries is not None:
            known.state = entries
            known.shown = {k: local_tensor(v) if isinstance(v, DTensor) else v for k, v in entries.items()}
            state[twin] = dict(known.shown)
        return twin

    def _hide(self, param: Any, state: dict) -> None:
        known = self._known[id(param)]
        known.twin.grad = None
        entries = state.pop(known.twin, None)
        if entries is not None:
            for key, value in entries.items():
                if key in known.shown and value is known.shown[key]:
                    entries[key] = known.state[key]
                elif isinstance(value, Tensor):
                    entries[key] = self.hide(value, param)
            state[param] = entries
        # What is loaded later need not lie beside it.
        known.state = known.shown = {}

    @override
    def show(self, tensor: Tensor, param: nn.Parameter) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    @override
    def hide(self, value: Tensor, param: nn.Parameter) -> Tensor:
        if not isinstance(param, DTensor) or not _is_plain(value) or value.shape != param.to_local().shape:
            return value
        return dtensor_as_it_is(value, param)


class Shards(View):
    """Shows DTensors, whole parameters as replicated ones. Communication: that of the optimizer's norms.

    Args:
        mesh (DeviceMesh): The mesh on which whole parameters are replicated.
    """

    name = 'DTensors'

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    @override
    def show(self, tensor: Tensor, param: nn.Parameter) -> Tensor:
        # Counters of steps stay plain, which DTensor lets pass.
        if isinstance(tensor, DTensor) or (tensor.dim() == 0 and param.dim() > 0):
            return tensor
        if isinstance(param, DTensor):
            # Loaded state of another shape, such as the rows of a matrix, is sharded where the parameter is.
            return part_of(tensor, param, [self._place(place, tensor, param) for place in param.placements])
        return DTensor.from_local(tensor, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)

    @staticmethod
    def _place(place: Any, tensor: Tensor, param: nn.Parameter) -> Any:
        dim = getattr(place, 'dim', None)
        fits = dim is not None and tensor.dim() == param.dim() and tensor.shape[dim] == param.shape[dim]
        return place if fits else Replicate()

    @override
    def step(self, optimizer: Optimizer, **kwargs: Any) -> None:
        with _WholeNumbers():
            super().step(optimizer, **kwargs)

    @override
    def hide(self, value: Tensor, param: nn.Parameter) -> Tensor:
        return value if isinstance(param, DTensor) or not isinstance(value, DTensor) else value.full_tensor()


class _WholeNumbers(TorchFunctionMode):
    """Norms, sums and means over all elements of a DTensor are plain tensors, complete on every rank.

    As DTensors they are this rank's part where a number is read from them, and cannot be mixed with plain ones.
    """

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor) and not isinstance(args[0], DTensor):
            # Sums of whole parameters, which are DTensors as well, into a plain one.
            args = tuple(item.full_tensor() if isinstance(item, DTensor) and not item.dim() else item for item in args)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, DTensor) and args:
            return _complete(result, args[0])
        if isinstance(result, (list, tuple)) and args and isinstance(args[0], (list, tuple)):
            if len(result) == len(args[0]) and any(isinstance(item, DTensor) for item in result):
                return type(result)(map(_complete, result, args[0]))
        return result


def _complete(result: Any, of: Any) -> Any:
    is_number = isinstance(result, DTensor) and result.dim() == 0
    if (
        is_number
        and isinstance(of, Tensor)
        and (of.dim() > 0 or any(place.is_partial() for place in result.placements))
    ):
        return result.full_tensor()
    return result


class OneByOne(View):
    """Shows whole tensors, of one parameter after the other.

    State of a parameter's shape stays sharded between steps, other state is whole on every rank. Communication per
    step: all-gathers of weights, gradients and sharded state. Computation is not shared: as much as under DDP. Memory:
    one parameter at a time is whole. Hooks of the optimizer's step are called once per parameter.
    """

    name = 'whole tensors, one by one'
    costs = (
        'needs whole tensors: each step gathers weight, gradient and state of one parameter after the other, and every '
        'rank computes all of it, as under DDP. State that has not the shape of its parameter is whole on every rank'
    )

    @override
    def step(self, optimizer: Optimizer, **kwargs: Any) -> None:
        groups = optimizer.param_groups
        params = [param for group in groups for param in group['params'] if param.grad is not None]
        # What groups count, they count once per step.
        before = [{key: value for key, value in group.items() if key != 'params'} for group in groups]
        for param in params:
            for group, options in zip(groups, before, strict=True):
                own = group['params']
                group.clear()
                group.update(options, params=own)
            with self._shown(optimizer, [param]):
                optimizer.step(**kwargs)

    @override
    def show(self, tensor: Tensor, param: nn.Parameter) -> Tensor:
        if isinstance(tensor, DTensor):
            return whole_of(tensor)
        # State that is whole was loaded to where its parameter lies. Counters of steps stay on the CPU.
        return tensor.to(device_of(param.device_mesh)) if isinstance(param, DTensor) and tensor.dim() else tensor

    @override
    def hide(self, value: Tensor, param: nn.Parameter) -> Tensor:
        if not isinstance(param, DTensor) or not _is_plain(value) or value.shape != param.shape:
            return value
        return part_of(value, param)

    @override
    def _take_back(self, param: nn.Parameter, twin: nn.Parameter) -> None:
        if isinstance(param, DTensor):
            param.to_local().copy_(part_of(twin.detach(), param).to_local())


def _is_plain(value: Tensor) -> bool:
    """Whether it is no subclass, such as quantised state, whose shape is not that of its memory."""
    return type(value) in (Tensor, nn.Parameter)
