"""Going on within an epoch: batches that were trained on are passed over where they are drawn, and not loaded.

MMEngine's loop by epochs begins the epoch anew, and then counts more iterations than there are.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from mmengine.runner import EpochBasedTrainLoop
from torch.utils.data import BatchSampler, IterableDataset


def position_in_epoch(loop: Any, iterations: int, epoch: int, world_size: int) -> dict[str, int | None] | None:
    """Say how much of an epoch is done.

    Args:
        loop (BaseLoop): The training loop.
        iterations (int): Done since the start of training.
        epoch (int): The number of the epoch.
        world_size (int): Number of ranks.

    Returns:
        dict[str, int or None], optional: Its batches that are done, and samples of one over all ranks, None where the
        loader does not tell; None where nothing of the epoch is done, or the loop has no epochs.
    """
    if not isinstance(loop, EpochBasedTrainLoop):
        return None
    batches = iterations - epoch * len(loop.dataloader)
    return dict(batches=batches, samples=_samples_per_batch(loop.dataloader, world_size)) if batches > 0 else None


def _samples_per_batch(loader: Any, world_size: int) -> int | None:
    """Over all ranks; None where the loader does not tell."""
    # One with a batch sampler of its own, as mmdet's configs have it, says None itself.
    sizes = [getattr(source, 'batch_size', None) for source in (loader, getattr(loader, 'batch_sampler', None))]
    return next((size * world_size for size in sizes if isinstance(size, int)), None)


def go_on_within_epoch(loop: Any, position: dict[str, int | None], saved_by: int, world_size: int) -> str | None:
    """Let the next epoch of a loop begin where the saved one was, on any number of ranks.

    Args:
        loop (EpochBasedTrainLoop): The loop, whose counters were resumed; they may change.
        position (dict[str, int or None]): As :func:`position_in_epoch` gave it.
        saved_by (int): Number of ranks that did.
        world_size (int): Number of ranks.

    Returns:
        str, optional: What cannot be exact; None where all is.
    """
    skipped, lost = _to_skip(loop.dataloader, position, saved_by, world_size)
    if skipped:
        # A loader lets nobody set it.
        loader = loop.dataloader.__dict__
        loader['batch_sampler'] = _From(loader['batch_sampler'], skipped)
        _number_from(loop, skipped)
    loop._iter = loop.epoch * len(loop.dataloader) + skipped
    return lost


def _to_skip(loader: Any, position: dict[str, Any], saved_by: int, world_size: int) -> tuple[int, str | None]:
    """How many batches, and what is not exact."""
    sampler = getattr(loader, 'batch_sampler', None)
    if sampler is None or isinstance(loader.dataset, IterableDataset):
        return 0, 'the epoch begins anew: its dataset draws samples by itself'
    before, now = position['samples'], _samples_per_batch(loader, world_size)
    if saved_by == world_size and before == now:
        return position['batches'], None
    name = type(sampler).__name__
    if before is None or now is None:
        return 0, (
            f'the epoch begins anew: {name} does not tell its batch size, and that or the number of ranks is another '
            'than in the run that was saved'
        )
    skipped, again = divmod(position['batches'] * before, now)
    lost = []
    if again:
        lost.append(f'{again} sample(s) of the epoch are trained on again, since batches have another size')
    if type(sampler) is not BatchSampler:
        lost.append(f'{name} makes other batches now: some samples of the epoch may come twice, and others not')
    return skipped, '; '.join(lost) or None


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
