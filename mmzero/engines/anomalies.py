"""Which module made nan or inf, in forward and in backward.

[Note: looking without waiting]
Each module's inputs and output, and the gradients of both, are reduced to one flag on the device, which nobody reads
as long as steps are done. Only a step that is skipped reads them, in the order in which they came: the first that is
set is where nan or inf began.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from mmzero.errors import NonFiniteError, ZeroError


class _Flag(NamedTuple):
    """Whether tensors are finite, and whose they are."""

    where: str
    name: str
    finite: Tensor


class Anomalies:
    """Watches every module of a model, step by step.

    Costs two passes over every input, and one over every output and the gradients of both; no communication as long
    as steps are done.

    Args:
        model (nn.Module): The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._flags: list[_Flag] = []
        self._inputs: dict[nn.Module, Tensor] = {}
        for name, module in model.named_modules():
            told = f'{name or "(the model)"} ({_class_name(module)})'
            module.register_forward_pre_hook(self._before(told), with_kwargs=True)
            module.register_forward_hook(self._after(told))

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            # In val no step comes that would clear what is kept.
            tensors = list(_floats((args, kwargs))) if self._model.training else []
            if tensors:
                self._inputs[module] = _all_finite(tensors)
                # Masks of attention hold inf, so that only nan is a fault.
                self._flags.append(_Flag('input', name, _none_nan(tensors)))
            for tensor in tensors:
                self._watch(tensor, 'input', name)

        return hook

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            tensors = list(_floats(output)) if self._model.training else []
            came_finite = self._inputs.pop(module, None)
            if not tensors:
                return
            finite = _all_finite(tensors)
            # Only what a module makes of finite inputs is its own.
            self._flags.append(_Flag('output', name, finite if came_finite is None else finite | ~came_finite))
            for tensor in tensors:
                self._watch(tensor, 'output', name)

        return hook

    def _watch(self, tensor: Tensor, place: str, name: str) -> None:
        if tensor.requires_grad and torch.is_grad_enabled():
            tensor.register_hook(self._on_gradient(f'gradient of the {place}', name))

    def _on_gradient(self, where: str, name: str) -> Callable[[Tensor], None]:
        def hook(grad: Tensor) -> None:
            self._flags.append(_Flag(where, name, _all_finite([grad])))

        return hook

    def clear(self) -> None:
        """Forget what was seen since the last step."""
        self._flags.clear()
        self._inputs.clear()

    def describe(self) -> str:
        """Say where nan or inf began on each rank. Collective; waits for the device.

        Returns:
            str: The same on every rank.
        """
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, self._first())
        told = [f'on rank {rank} in the {first}' for rank, first in enumerate(everyones) if first]
        if not told:
            return 'every output of a module, and every gradient of one, is finite: it began in code between modules'
        return f'it began {", ".join(told[:8])}' + (f' and on {len(told) - 8} more ranks' if len(told) > 8 else '')

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Let an error of a step, such as that of a matcher that is given nan, say where nan or inf began.

        Yields:
            None: The step runs inside.

        Raises:
            NonFiniteError: In place of an error, where something was not finite on this rank.
        """
        try:
            yield
        except ZeroError:
            raise
        except Exception as error:
            first = self._first()
            if first is None:
                raise
            raise NonFiniteError(
                f'{type(error).__name__}: {error}; nan or inf began in the {first}, before that error. Look at this '
                "rank's data, the learning rate and its warmup"
            ) from error

    def _first(self) -> str | None:
        """What came first of the outputs and inputs that are not finite, else the first gradient."""
        bad = [flag for flag in self._flags if not flag.finite]
        for flag in (*(flag for flag in bad if flag.where in ('output', 'input')), *bad):
            before = ' (in the data, or in code before it)' if flag.where == 'input' else ''
            return f'{flag.where} of {flag.name}{before}'
        return None


def _class_name(module: nn.Module) -> str:
    # FSDP2 swaps the class for one of its own.
    return next(cls.__name__ for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


def _floats(value: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
            yield leaf


def _all_finite(tensors: list[Tensor]) -> Tensor:
    return torch.stack([torch.isfinite(tensor.detach()).all() for tensor in tensors]).all()


def _none_nan(tensors: list[Tensor]) -> Tensor:
    return ~torch.stack([torch.isnan(tensor.detach()).any() for tensor in tensors]).any()
