"""What is looked at in the first iteration of each kind, and no longer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from mmzero._compat import default_store
from mmzero.engines.eagerly import eagerly
from mmzero.engines.fsdp2.following import Following
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
        self.modules: list[tuple[Any, Unit]] = [(model.get_submodule(unit.name), unit) for unit in plan.units]
        self.done: set[str] = set()

    def prepare(self, kind: str) -> None:
        """Free what is gathered if the first iteration is to come. To be done on every rank.

        Args:
            kind (str): Such as 'train'.
        """
        if kind not in self.done:
            for module, _ in self.modules:
                # What an earlier val left gathered would hide a use before the forward of its unit.
                module.reshard()

    @contextmanager
    def watch(self, kind: str, following: Following | None = None) -> Iterator[Callable[[Any], None]]:
        """Watch an iteration if it is the first of its kind.

        Args:
            kind (str): Such as 'train'.
            following (Following, optional): The loop over val or test data, in which some ranks may have no batch.
                Defaults to None.

        Yields:
            Callable[[Any], None]: Refuses a loss that was computed from shards.
        """
        if kind in self.done:
            yield _nothing
            return
        self.prepare(kind)
        if following is None:
            same = SameUnits(self.modules)
        else:
            same = SameUnits(self.modules, self._key(kind, following), sum(following.present))
        # What is compiled under the mode would be compiled again without it.
        with eagerly(), same.watching(one_forward=kind != 'train'), OutsideUses(self.model, self.plan) as uses:
            yield uses.check
        self.done.add(kind)
        if following is not None and following.tells:
            default_store().set(f'{self._key(kind, following)}/done', '')

    def done_by_others(self, kind: str, following: Following) -> None:
        """Look no longer, on a rank without a batch, where the ranks that had one have looked.

        Args:
            kind (str): Such as 'val'.
            following (Following): The loop, at its end.
        """
        if not following.is_present and True in following.present:
            if default_store().check([f'{self._key(kind, following)}/done']):
                self.done.add(kind)

    @staticmethod
    def _key(kind: str, following: Following) -> str:
        return f'{following.key}/same in {kind}'


def _nothing(loss: Tensor) -> None:
    """What is not watched is not checked."""
