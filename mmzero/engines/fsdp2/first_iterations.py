"""What is looked at in the first iteration of each kind, and no longer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from mmzero.engines.fsdp2.outside import OutsideUses
from mmzero.engines.fsdp2.together import SameUnits
from mmzero.policies import Unit, WrapPlan


class FirstIterations:
    """Watches the first iteration of each kind.

    Args:
        model (nn.Module): The sharded model.
        plan (WrapPlan): Its units.
    """

    def __init__(self, model: nn.Module, plan: WrapPlan) -> None:
        self.model = model
        self.plan = plan
        self.done: set[str] = set()

    @contextmanager
    def watch(self, kind: str) -> Iterator[Callable[[Any], None]]:
        """Watch an iteration if it is the first of its kind.

        Args:
            kind (str): Such as 'train'.

        Yields:
            Callable[[Any], None]: Refuses a loss that was computed from shards.
        """
        # Whatever is compiled would be compiled again once the mode is gone.
        if kind in self.done or any(module._compiled_call_impl is not None for module in self.model.modules()):
            yield _nothing
            return
        modules: list[tuple[Any, Unit]] = [(self.model.get_submodule(unit.name), unit) for unit in self.plan.units]
        for module, _ in modules:
            # What an earlier val left gathered would hide a use before the forward of its unit.
            module.reshard()
        with SameUnits(modules).watching(), OutsideUses(self.model, self.plan) as uses:
            yield uses.check
        self.done.add(kind)


def _nothing(loss: Tensor) -> None:
    """What is not watched is not checked."""
