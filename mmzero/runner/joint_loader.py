"""Data loaders of which ranks have different numbers of batches, in MMEngine's loops.

Loops iterate over ``self.dataloader``, each in its own way, so that is where ranks that have no more batches take part
in what the others do. A loader gets a class of its own and stays the same object, since hooks reach into it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from mmengine.runner import BaseLoop, EpochBasedTrainLoop, IterBasedTrainLoop
from torch.utils.data import DataLoader

from mmzero.errors import DataError
from mmzero.hooks import put_before
from mmzero.wrappers import ZeroModelWrapper


class JointLoader(DataLoader):
    """What a loader's class becomes the first base of."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        model, kind, _ = self.__dict__['_mmzero_joint']
        wrapper = model()
        return super().__iter__() if wrapper is None else wrapper.join(super().__iter__(), kind)

    def __len__(self) -> int:
        _, _, length = self.__dict__['_mmzero_joint']
        return super().__len__() if length is None else length


def join_loader(
    loader: Any, model: Callable[[], ZeroModelWrapper | None], kind: str, length: int | None = None
) -> None:
    """Let all ranks iterate over a data loader together.

    Args:
        loader (DataLoader): Of a loop; anything else stays as it is.
        model (Callable[[], ZeroModelWrapper | None]): Gives the model that the loop runs, once it is built.
        kind (str): 'train', 'val' or 'test'.
        length (int, optional): The number of batches that it says. Defaults to None: its own.
    """
    if not isinstance(loader, DataLoader):
        return
    put_before(loader, JointLoader).__dict__['_mmzero_joint'] = (model, kind, length)


def join_train_loop(loop: BaseLoop, model: Callable[[], ZeroModelWrapper | None]) -> list[int | None]:
    """Let ranks with different numbers of batches train together. Collective.

    Schedules, logs and hooks count iterations, so that all ranks have to say the same number: the largest. A loop by
    iterations starts its loader anew on each rank, as it does under DDP.

    Args:
        loop (BaseLoop): The loop.
        model (Callable[[], ZeroModelWrapper | None]): Gives the model, once it is built.

    Returns:
        list[int | None]: The numbers of batches by rank; None where a rank cannot tell.

    Raises:
        DataError: On every rank, if a rank of a loop by iterations has no batch to start anew with.
    """
    lengths: list[int | None] = [None] * dist.get_world_size()
    own = _length(loop.dataloader)
    dist.all_gather_object(lengths, own)
    if isinstance(loop, IterBasedTrainLoop):
        if 0 in lengths:
            raise DataError(
                f'train_dataloader: ranks have {_joined(lengths)} batches, and a loop by iterations needs one on each; '
                'use fewer ranks, a smaller batch_size, or drop_last=False'
            )
        return lengths
    known = [length for length in lengths if length is not None]
    longest = max(known) if len(set(known)) > 1 else None
    join_loader(loop.dataloader, model, 'train', longest)
    if longest is not None and isinstance(loop, EpochBasedTrainLoop) and loop.max_iters == loop.max_epochs * (own or 0):
        loop._max_iters = loop.max_epochs * longest
    return lengths


def describe(lengths: list[int | None]) -> str | None:
    """Say what becomes of ranks with different numbers of batches.

    Args:
        lengths (list[int | None]): By rank.

    Returns:
        str or None: A line for the log; None where they are the same.
    """
    if len(set(lengths)) == 1:
        return None
    return (
        f'train_dataloader: ranks have {_joined(lengths)} batches. A rank that has no more takes part in the steps of '
        'the others with a gradient of zeros, so that every sample counts once'
    )


def _joined(lengths: list[int | None]) -> str:
    return ', '.join(map(str, lengths))


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
