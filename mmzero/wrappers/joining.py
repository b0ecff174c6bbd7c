"""Iterating over batches of which ranks have different numbers ([Note: the end of a loop])."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from mmzero.engines import Engine, Loop
from mmzero.wrappers.stand_in import StandIn

_NONE = object()


def evaluated(loader: Iterable, kind: str, engine: Engine) -> Iterator[Any]:
    """Iterate over the batches of val or test, then take part in what other ranks still run.

    Args:
        loader (Iterable): This rank's batches.
        kind (str): 'val' or 'test'.
        engine (Engine): The engine that sharded the model.

    Yields:
        Any: A batch.
    """
    with Loop(kind) as loop:
        batches = iter(loader)
        batch = next(batches, _NONE)
        with engine.following_forwards(loop, loop.which_ranks(batch is not _NONE, engine.device)) as follow:
            while batch is not _NONE:
                yield batch
                batch = next(batches, _NONE)
            while loop.another_goes_on():
                follow()


def trained(loader: Iterable, stand_in: StandIn, device: torch.device) -> Iterator[Any]:
    """Iterate over the batches of training, then over copies of one as long as other ranks train.

    Args:
        loader (Iterable): This rank's batches.
        stand_in (StandIn): Keeps the copy.
        device (torch.device): Where this rank computes.

    Yields:
        Any: A batch.
    """
    with Loop('train') as loop:
        batches = iter(loader)
        batch = next(batches, _NONE)
        if batch is not _NONE:
            stand_in.keep(batch)
        have = loop.which_ranks(stand_in.is_there, device)
        if True in have and not all(have):
            _share(stand_in, have.index(True))
        while batch is not _NONE:
            stand_in.keep(batch)
            yield batch
            batch = next(batches, _NONE)
        while loop.another_goes_on():
            with stand_in.used() as copied:
                yield copied


def _share(stand_in: StandIn, source: int) -> None:
    """Give the ranks that have no batch that of one which has."""
    box = [stand_in.batch if dist.get_rank() == source else None]
    dist.broadcast_object_list(box, src=source)
    if not stand_in.is_there:
        stand_in.batch = box[0]
