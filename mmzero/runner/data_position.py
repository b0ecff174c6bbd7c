"""Going on where a saved run was: batches that were trained on are passed over where they are drawn, and not loaded.

MMEngine's loop by epochs begins the epoch anew, and then counts more iterations than there are; its loop by iterations
loads all batches once more, and on another number of ranks goes on at another sample.
"""

from itertools import islice
from typing import Any

import torch.distributed as dist
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from torch.utils.data import BatchSampler, IterableDataset

from mmzero.runner.data_stream import BatchesFrom, DataStream, put_batch_sampler

Position = dict[str, Any]


def position_of(loop: Any, iterations: int, epoch: int, world_size: int) -> Position | None:
    """Say how much of the data is done. Collective for a loop by iterations.

    Args:
        loop (BaseLoop): The training loop.
        iterations (int): Done since the start of training.
        epoch (int): The number of the epoch.
        world_size (int): Number of ranks.

    Returns:
        dict, optional: ``samples`` of a batch over all ranks, None where the loader does not tell, and of a loop by
        epochs the ``batches`` of the epoch that are done, of one by iterations the ``places`` of all ranks: the pass
        over the loader, and its batches that are done. None where nothing of the epoch is done, or the loop says
        itself where it is.
    """
    if isinstance(loop, EpochBasedTrainLoop):
        batches = iterations - epoch * len(loop.dataloader)
        return dict(batches=batches, samples=_samples_per_batch(loop.dataloader, world_size)) if batches > 0 else None
    stream = getattr(loop, 'dataloader_iterator', None)
    if not isinstance(stream, DataStream):
        return None
    places: list[Any] = [None] * world_size
    dist.all_gather_object(places, list(stream.place))
    return dict(places=places, samples=_samples_per_batch(loop.dataloader, world_size))


def _samples_per_batch(loader: Any, world_size: int) -> int | None:
    """Over all ranks; None where the loader does not tell."""
    # One with a batch sampler of its own, as mmdet's configs have it, says None itself.
    sizes = [getattr(source, 'batch_size', None) for source in (loader, getattr(loader, 'batch_sampler', None))]
    return next((size * world_size for size in sizes if isinstance(size, int)), None)


def go_on(loop: Any, position: Position | None, saved_by: int | None, rank: int, world_size: int) -> str | None:
    """Let a loop go on where the saved one was, on any number of ranks.

    Args:
        loop (BaseLoop): The loop, whose counters were resumed; they may change.
        position (dict, optional): As :func:`position_of` gave it; None of a checkpoint that has none.
        saved_by (int, optional): Number of ranks that did; None where the checkpoint does not tell.
        rank (int): This rank.
        world_size (int): Number of ranks.

    Returns:
        str, optional: What cannot be exact; None where all is.
    """
    if isinstance(loop, EpochBasedTrainLoop) and position is not None and 'batches' in position:
        return _go_on_within_epoch(loop, position, saved_by, world_size)
    if isinstance(loop, IterBasedTrainLoop) and loop.iter > 0:
        return _go_on_in_stream(loop, position, saved_by, rank, world_size)
    return None


def _go_on_within_epoch(loop: Any, position: Position, saved_by: int | None, world_size: int) -> str | None:
    loader = loop.dataloader
    sampler: Any = getattr(loader, 'batch_sampler', None)
    skipped: int = 0
    lost: str | None = 'the epoch begins anew: its dataset draws samples by itself'
    if sampler is not None and not isinstance(loader.dataset, IterableDataset):
        skipped, lost = _to_skip(loader, position['batches'], position['samples'], saved_by, world_size)
    if skipped:
        put_batch_sampler(loader, BatchesFrom(sampler, lambda: islice(sampler, skipped, None)))
        _number_from(loop, skipped)
    loop._iter = loop.epoch * len(loader) + skipped
    return lost


def _go_on_in_stream(
    loop: Any, position: Position | None, saved_by: int | None, rank: int, world_size: int
) -> str | None:
    stream, loader = loop.dataloader_iterator, loop.dataloader
    if not isinstance(stream, DataStream):
        return f'{type(loop).__name__} has a run() of its own, which says with which batch it goes on'
    reason = stream.why_not()
    stream.expect_drops(loop.iter, loads=reason is not None)
    if reason is not None:
        return f'{loop.iter} batches are loaded to be passed over: {reason}'
    if position is None or 'places' not in position:
        # As MMEngine takes it: saved by as many ranks, with as large batches, from the first batch on.
        saved_by, position = world_size, dict(samples=_samples_per_batch(loader, world_size))
        position['places'] = [[0, loop.iter]] * world_size
    places = position['places']
    epoch, batches = places[rank if saved_by == world_size else 0]
    skipped, lost = _to_skip(loader, batches, position['samples'], saved_by, world_size)
    if saved_by != world_size and any(place != places[0] for place in places):
        lost = _joined(lost, 'ranks were at different places of their data: some samples may come twice, others not')
    if not stream.go_to(epoch, skipped):
        name = type(loader.sampler if loader.batch_size else loader.batch_sampler.sampler).__name__
        lost = _joined(lost, f'{name} draws from the random numbers of its process: the batches are others')
    return lost


def _to_skip(
    loader: Any, batches: int, before: int | None, saved_by: int | None, world_size: int
) -> tuple[int, str | None]:
    """How many batches, and what is not exact."""
    now = _samples_per_batch(loader, world_size)
    if saved_by == world_size and before == now:
        return batches, None
    name = type(loader.batch_sampler).__name__
    if before is None or now is None:
        return 0, (
            f'the epoch begins anew: {name} does not tell its batch size, and that or the number of ranks is another '
            'than in the run that was saved'
        )
    skipped, again = divmod(batches * before, now)
    lost = None
    if again:
        lost = f'{again} sample(s) of the epoch are trained on again, since batches have another size'
    if type(loader.batch_sampler) is not BatchSampler:
        lost = _joined(lost, f'{name} makes other batches now: some samples of the epoch may come twice, others not')
    return skipped, lost


def _joined(*texts: str | None) -> str:
    return '; '.join(text for text in texts if text is not None)


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
