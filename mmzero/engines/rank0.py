"""Work that one rank does for all, with its failure raised on all."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from mmzero.errors import ZeroError

T = TypeVar('T')


def on_rank0(work: Callable[[], T]) -> T | None:
    """Run something on rank 0 while the others wait. Collective.

    Args:
        work (Callable[[], T]): What to run; it must not communicate.

    Returns:
        T or None: Its result on rank 0, None on other ranks.

    Raises:
        Exception: Rank 0's own error on rank 0, and on the other ranks the same if users can mend it, else a
            RuntimeError that names it; so that no rank waits for one that has gone.
    """
    result, error = None, None
    if dist.get_rank() == 0:
        try:
            result = work()
        except Exception as caught:
            error = caught
    summary = error if isinstance(error, ZeroError) else None if error is None else f'{type(error).__name__}: {error}'
    box = [summary]
    dist.broadcast_object_list(box, src=0)
    if error is not None:
        raise error
    if isinstance(box[0], ZeroError):
        raise box[0]
    if box[0] is not None:
        raise RuntimeError(f'rank 0 failed with {box[0]}')
    return result
