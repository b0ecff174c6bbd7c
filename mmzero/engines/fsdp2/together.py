"""Whether all ranks run the same units, in the first iteration of each kind.

[Note: units run together]
A unit that one rank runs and another does not leaves the first in an all-gather until the group's timeout, or exchanges
its parameters with those of another unit of equal size. In the first iteration each rank leaves word at the store
before it runs a unit, and waits until all are about to run the same, before any communicates. Cost: a few messages per
unit and rank. What differs from rank to rank only later is not seen. In val and test the first forward is compared: a
step may have several (views of an image), of which ranks may have different numbers ([Note: following]).
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from mmzero._compat import default_store, group_timeout
from mmzero.engines.place import looks
from mmzero.errors import OtherRankError, PlanError, ZeroError
from mmzero.policies import Unit, without

# The first ones follow each other closely; after them it is asked where the other ranks are.
PATIENT_LOOKS = 7
# For the life of the process: keys are new also to the next model.
_watches = itertools.count()


class SameUnits:
    """Compares the units that this rank runs with those of the others.

    Args:
        units (Sequence[tuple[nn.Module, Unit]]): Sharded modules and their units.
        key (str, optional): A key of the store that is new on all ranks. Defaults to None: the next of a row.
        size (int, optional): The number of ranks that run units. Defaults to None: all.
    """

    def __init__(
        self, units: Sequence[tuple[nn.Module, Unit]], key: str | None = None, size: int | None = None
    ) -> None:
        self.units = units
        self.rank, self.size = dist.get_rank(), size or dist.get_world_size()
        self.key = key or f'mmzero/units/{next(_watches)}'
        self.count = 0
        self.is_over = False

    @contextmanager
    def watching(self, one_forward: bool = False) -> Iterator[None]:
        """Compare, also that all ranks come to the end.

        Args:
            one_forward (bool): Whether the end is that of the first forward of the model. Defaults to False.

        Yields:
            None: Forwards of units inside are compared before they run.

        Raises:
            PlanError: If another rank runs another unit, or raised one.
            OtherRankError: If another rank failed otherwise.
        """
        if self.size == 1:
            yield
            return
        # Before FSDP2's own hooks, which communicate.
        handles = [module.register_forward_pre_hook(self._before(unit), prepend=True) for module, unit in self.units]
        if one_forward:
            roots = [module for module, unit in self.units if unit.is_root]
            handles += [root.register_forward_hook(lambda *_: self._end()) for root in roots]
        try:
            yield
            self._end()
        except Exception as error:
            self._tell(error)
            raise
        finally:
            for handle in handles:
                handle.remove()

    def _end(self) -> None:
        if not self.is_over:
            self.compare('', '')
            self.is_over = True

    def _tell(self, error: Exception) -> None:
        """Let the other ranks raise the first error, too, instead of waiting."""
        store, fault = default_store(), f'{self.key}/fault'
        if not store.check([fault]):
            kind = 'plan' if isinstance(error, PlanError) else 'other'
            text = str(error) if isinstance(error, ZeroError) else f'{type(error).__name__}: {error}'
            store.set(fault, f'{kind} {self.rank} {text}')

    def _before(self, unit: Unit) -> Any:
        def compare(module: nn.Module, args: tuple) -> None:
            if not self.is_over:
                self.compare(unit.name or '(root)', unit.class_name)

        return compare

    def compare(self, name: str, class_name: str) -> None:
        """Leave word of a unit, and wait until all ranks are about to run the same.

        Args:
            name (str): The unit; '' is the end.
            class_name (str): Its class.

        Raises:
            PlanError: If another rank runs another.
        """
        store, key = default_store(), f'{self.key}/{self.count}'
        self.count += 1
        store.set(f'{key}/{self.rank}', f'{name} {class_name}')
        if store.add(f'{key}/at {name}', 1) == self.size:
            store.set(f'{key}/all', '')
        for number, _ in enumerate(looks()):
            if store.check([f'{key}/all']):
                return
            self._raise_fault()
            if number >= PATIENT_LOOKS:
                self._look_for_others(key, name, class_name)
        raise PlanError(f'rank {self.rank} {_place(name, class_name)}; not all came in {group_timeout()}')

    def _raise_fault(self) -> None:
        """Raise what another rank has failed with."""
        store = default_store()
        if store.check([f'{self.key}/fault']):
            kind, rank, text = store.get(f'{self.key}/fault').decode().split(' ', 2)
            raise PlanError(text) if kind == 'plan' else OtherRankError(f'rank {rank} failed with {text}')

    def _look_for_others(self, key: str, name: str, class_name: str) -> None:
        store = default_store()
        for rank in range(dist.get_world_size()):
            if not store.check([f'{key}/{rank}']):
                continue
            theirs, _, their_class = store.get(f'{key}/{rank}').decode().partition(' ')
            if theirs != name:
                raise PlanError(
                    f'rank {self.rank} {_place(name, class_name)}, while rank {rank} {_place(theirs, their_class)}. '
                    'All ranks have to run the same units in the same order, since they gather them together: leave '
                    f'{class_name or their_class} out of wrap_policy, so that its parameters stay in a unit that '
                    'every rank runs, and set find_unused_parameters=True: '
                    f'{without(class_name or their_class)}, where POLICY is what stands there now'
                )


def _place(name: str, class_name: str) -> str:
    return f'is about to run the unit {name} ({class_name})' if name else 'has come to the end of its forward'
