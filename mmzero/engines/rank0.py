"""Work that one rank does for all, or each for itself, with a failure raised on all."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from mmzero.errors import ZeroError

T = TypeVar('T')


def on_rank0(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T | None:
    """Run something on rank 0 while the others wait. Collective.

    Args:
        work (Callable[[], T]): What to run; it must not communicate.
        group (ProcessGroup, optional): Of all ranks, over which they agree. Defaults to None: the one that trains.

    Returns:
        T or None: Its result on rank 0, None on other ranks.

    Raises:
        Exception: Rank 0's own error on rank 0, and on the other ranks the same if users can mend it, else a
            RuntimeError that names it; so that no rank waits for one that has gone.
    """
    result, error = _tried(work) if dist.get_rank() == 0 else (None, None)
    box = [_summary(error)]
    dist.broadcast_object_list(box, src=0, group=group)
    if error is not None:
        raise error
    if isinstance(box[0], ZeroError):
        raise box[0]
    if box[0] is not None:
        raise RuntimeError(f'rank 0 failed with {box[0]}')
    return result


def from_rank0(work: Callable[[], T]) -> T:
    """Run something on rank 0, and give its result to all. Collective.

    Args:
        work (Callable[[], T]): As of :func:`on_rank0`; its result is picklable.

    Returns:
        T: The result.

    Raises:
        Exception: As :func:`on_rank0`.
    """
    box = [on_rank0(work)]
    dist.broadcast_object_list(box, src=0)
    return box[0]  # type: ignore[return-value]


def together(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run something on every rank, and go on only where all have done it. Collective.

    Args:
        work (Callable[[], T]): What to run; it must not communicate.
        group (ProcessGroup, optional): Of all ranks, over which they agree. Defaults to None: the one that trains.

    Returns:
        T: This rank's result.

    Raises:
        Exception: On a rank that failed its own error, and on the others that of the first that did: the same if users
            can mend it, else a RuntimeError that names it.
    """
    result, error = _tried(work)
    summaries: list = [None] * dist.get_world_size()
    dist.all_gather_object(summaries, _summary(error), group)
    if error is not None:
        raise error
    for rank, summary in enumerate(summaries):
        if isinstance(summary, ZeroError):
            raise summary
        if summary is not None:
            raise RuntimeError(f'rank {rank} failed with {summary}')
    return result  # type: ignore[return-value]


def _tried(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _summary(error: Exception | None) -> ZeroError | str | None:
    return error if isinstance(error, ZeroError) or error is None else f'{type(error).__name__}: {error}'
