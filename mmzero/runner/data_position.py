"""Going on within an epoch: batches that were trained on are passed over where they are drawn, and not loaded.

MMEngine's loop by epochs begins the epoch anew, and then counts more iterations than there are.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from mmengine.runner import EpochBasedTrainLoop


def position_in_epoch(loop: Any, iterations: int, epoch: int, world_size: int) -> dict[str, int] | None:
    """Say how much of an epoch is done.

    Args:
        loop (BaseLoop): The training loop.
        iterations (int): Done since the start of training.
        epoch (int): The number of the epoch.
        world_size (int): Number of ranks.

    Returns:
        dict[str, int], optional: Its batches that are done, and samples of one over all ranks; None where nothing of
        it is, or the loop or its loader does not tell.
    """
    batch_size = getattr(loop.dataloader, 'batch_size', None)
    if not isinstance(loop, EpochBasedTrainLoop) or batch_size is None:
        return None
    batches = iterations - epoch * len(loop.dataloader)
    return dict(batches=batches, samples=batch_size * world_size) if batches > 0 else None


def go_on_within_epoch(loop: Any, position: dict[str, int], world_size: int) -> str | None:
    """Let the next epoch of a loop begin where the saved one was, on any number of ranks.

    Args:
        loop (EpochBasedTrainLoop): The loop, whose counters were resumed; they may change.
        position (dict[str, int]): As :func:`position_in_epoch` gave it.
        world_size (int): Number of ranks.

    Returns:
        str, optional: What cannot be exact; None where all is.
    """
    now = position_in_epoch(loop, 1 + loop.epoch * len(loop.dataloader), loop.epoch, world_size)
    if now is None:
        return 'the epoch begins anew: its loader does not tell its batch size'
    done = position['batches'] * position['samples']
    skipped = done // now['samples']
    if skipped:
        # A loader lets nobody set it.
        loader = loop.dataloader.__dict__
        loader['batch_sampler'] = _From(loader['batch_sampler'], skipped)
        _number_from(loop, skipped)
    loop._iter = loop.epoch * len(loop.dataloader) + skipped
    if done % now['samples']:
        return f'{done % now["samples"]} samples of the epoch are trained on again, since batches have another size'
    return None


class _From:
    """A batch sampler whose first epoch begins later; hooks reach the one inside through it.

    Args:
        sampler (Sampler): The batch sampler.
        batches (int): How many are passed over, once.
    """

    def __init__(self, sampler: Any, batches: int) -> None:
        self._sampler, self._batches = sampler, batches

    def __iter__(self) -> Iterator[Any]:
        first, self._batches = self._batches, 0
        return islice(self._sampler, first, None)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__['_sampler'], name)


def _number_from(loop: Any, first: int) -> None:
    """Count the batches of the next epoch on, for hooks that ask for their number."""
    run_iter, run_epoch = loop.run_iter, loop.run_epoch

    def numbered() -> None:
        loop.run_iter = lambda index, batch: run_iter(index + first, batch)
        del loop.run_epoch
        try:
            run_epoch()
        finally:
            del loop.run_iter

    loop.run_epoch = numbered
