"""The batches of a loop by iterations: counted as they come, and passed over without loading them.

[Note: a stream that goes on]
MMEngine's loop by iterations takes batches from one iterator, which begins its loader anew whenever that ends. On
resume it asks for as many as it has done, and drops them: each is loaded once more. Here its iterator answers with
nothing while it asks, and the first batch that it loads is the one where the saved run was. Its place is the number of
the pass over the loader, by which samplers shuffle, and the number of batches of that pass. What lies before in the
pass is drawn from the sampler: samplers that never end, and batch samplers that collect, have no other way to a place.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from mmengine.registry import LOOPS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from torch.utils.data import DataLoader, IterableDataset

from mmzero._compat import InfiniteIterator
from mmzero.hooks import put_before
from mmzero.runner.lookup import lookup


class DataStream(InfiniteIterator):
    """Takes the place of the iterator of MMEngine's loop by iterations.

    Args:
        iterator (InfiniteIterator): MMEngine's, from which nothing was taken.
        before_batch (Callable[[], None]): Called before a batch is loaded.
    """

    def __init__(self, iterator: InfiniteIterator, before_batch: Callable[[], None]) -> None:
        # Its own would start workers.
        self.__dict__.update(vars(iterator))
        self._before_batch = before_batch
        self._batches, self._to_drop, self._loads_dropped = 0, 0, True

    @property
    def place(self) -> tuple[int, int]:
        """The number of the pass over the loader, and of the batches of it that are taken."""
        return self._epoch, self._batches

    def __next__(self) -> Any:
        is_dropped = self._to_drop > 0
        self._to_drop -= is_dropped
        if is_dropped and not self._loads_dropped:
            return None
        if not is_dropped:
            self._before_batch()
        epoch = self._epoch
        batch = super().__next__()
        self._batches = 1 if self._epoch != epoch else self._batches + 1
        return batch

    def expect_drops(self, count: int, loads: bool) -> None:
        """Prepare for a loop that drops batches before it trains.

        Args:
            count (int): How many.
            loads (bool): Whether they are loaded, where they cannot be passed over.
        """
        self._to_drop, self._loads_dropped = count, loads

    def why_not(self) -> str | None:
        """Say why no batch can be passed over.

        Returns:
            str, optional: The reason; None where they can.
        """
        loader = self._dataloader
        if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
            return 'the dataset draws samples by itself'
        if loader.num_workers and not isinstance(self._iterator, _Later):
            return 'workers of the loader have begun to load; build the runner with resume=True'
        return None

    def go_to(self, epoch: int, batches: int) -> bool:
        """Go to a place, without loading what lies before.

        Args:
            epoch (int): Number of the pass over the loader.
            batches (int): To pass over in it; more than it has are those of the next.

        Returns:
            bool: Whether another run finds the same batches there: the sampler has drawn from numbers of its own.
        """
        self._epoch = epoch
        sampler, before = self._dataloader.batch_sampler, _process_numbers()
        rest = self._draw(batches)
        is_same = _process_numbers() == before
        put_batch_sampler(self._dataloader, BatchesFrom(sampler, lambda: rest))
        self._iterator = iter(self._dataloader)
        return is_same

    def _draw(self, batches: int) -> Iterator[Any]:
        """Pass over batches; gives those that are left of the pass."""
        while True:
            self._set_epoch()
            drawn = iter(self._dataloader.batch_sampler)
            passed = sum(1 for _ in islice(drawn, batches))
            # Begun for certain: hooks set the sampler to epoch 0 before training.
            following = list(islice(drawn, 1))
            # A pass without any batch would be followed by the like.
            if following or not passed:
                self._batches = passed
                return chain(following, drawn)
            self._epoch, batches = self._epoch + 1, batches - passed

    def _set_epoch(self) -> None:
        # Where MMEngine's iterator sets it.
        loader = self._dataloader
        samplers: tuple[Any, Any] = (loader.sampler, getattr(loader.batch_sampler, 'sampler', None))
        for sampler in samplers:
            if hasattr(sampler, 'set_epoch'):
                sampler.set_epoch(self._epoch)
                return


def _process_numbers() -> tuple:
    """Random states from which a sampler should not draw."""
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2], torch.get_rng_state().numpy().tobytes()


class BatchesFrom:
    """A batch sampler whose first pass begins later; hooks reach the one inside through it.

    Args:
        sampler (Sampler): The batch sampler.
        first (Callable[[], Iterator]): Gives the batches of the first pass.
    """

    def __init__(self, sampler: Any, first: Callable[[], Iterator[Any]]) -> None:
        self._sampler, self._first = sampler, [first]

    def __iter__(self) -> Iterator[Any]:
        # Once a batch is asked for: a loader with workers iterates twice, and takes batches of the second one alone.
        yield from self._first.pop()() if self._first else self._sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__['_sampler'], name)


def put_batch_sampler(loader: Any, sampler: Any) -> None:
    """Give a loader that is built another batch sampler.

    Args:
        loader (DataLoader): The loader, which lets nobody set it.
        sampler (Sampler): The batch sampler.
    """
    loader.__dict__['batch_sampler'] = sampler


class LateLoader(DataLoader):
    """What a loader's class becomes the first base of: its workers start with the first batch that is asked for."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return _Later(self) if self.__dict__.pop('_mmzero_is_late', False) else super().__iter__()


class _Later:
    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._loader)
        return next(self._iterator)


def start_later(loader: Any) -> None:
    """Let a loader that is iterated over where a loop is built start its workers at the first batch.

    Args:
        loader (DataLoader): The loader; anything else stays as it is.
    """
    if isinstance(loader, DataLoader):
        put_before(loader, LateLoader).__dict__['_mmzero_is_late'] = True


def runs_by_iterations(loop: Any, scope: str = 'mmengine') -> bool:
    """Say whether a loop takes and drops batches as MMEngine's loop by iterations.

    Args:
        loop (BaseLoop or dict): The loop or its config.
        scope (str): The default scope, in which the name of a class is looked up. Defaults to 'mmengine'.

    Returns:
        bool: Whether it does; False for a loop with a ``run`` of its own.
    """
    if not isinstance(loop, Mapping):
        cls: Any = None if 'run' in vars(loop) else type(loop)
    elif 'type' in loop:
        cls = lookup(LOOPS, loop['type'], scope)[0] if isinstance(loop['type'], str) else loop['type']
    else:
        cls = EpochBasedTrainLoop if loop.get('by_epoch') else IterBasedTrainLoop
    is_one = isinstance(cls, type) and issubclass(cls, IterBasedTrainLoop)
    return is_one and cls.run is IterBasedTrainLoop.run


def count_batches(loop: Any, before_batch: Callable[[], None]) -> None:
    """Let the iterator of a loop by iterations know its place; other loops stay as they are.

    Args:
        loop (BaseLoop): The loop.
        before_batch (Callable[[], None]): Called before a batch is loaded.
    """
    if runs_by_iterations(loop) and type(loop.dataloader_iterator) is InfiniteIterator:
        loop.dataloader_iterator = DataStream(loop.dataloader_iterator, before_batch)
