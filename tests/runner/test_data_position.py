"""What is not exact where a run goes on within an epoch, and is said."""

from types import SimpleNamespace
from typing import Any

import pytest
from mmengine.runner import EpochBasedTrainLoop
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from mmzero.runner.data_position import go_on, position_of


class Pairs(BatchSampler):
    """Has a class of its own."""


class Untold(Pairs):
    """Has no size that is a number."""

    def __init__(self, sampler: Any, batch_size: int) -> None:
        super().__init__(sampler, batch_size, False)
        self.batch_size: Any = [batch_size]

    def __iter__(self) -> Any:
        return iter(BatchSampler(self.sampler, self.batch_size[0], False))

    def __len__(self) -> int:
        return len(BatchSampler(self.sampler, self.batch_size[0], False))


class Stream(IterableDataset):
    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Any:
        return iter(range(12))


def loop_of(loader: DataLoader) -> Any:
    loop = EpochBasedTrainLoop.__new__(EpochBasedTrainLoop)
    vars(loop).update(dataloader=loader, _epoch=1, _iter=-1)
    return loop


def loader_of(cls: Any, size: int) -> DataLoader:
    data = list(range(12))
    if cls is Untold:
        return DataLoader(data, batch_sampler=Untold(SequentialSampler(data), size))  # type: ignore[arg-type]
    if cls is Pairs:
        return DataLoader(data, batch_sampler=Pairs(SequentialSampler(data), size, False))  # type: ignore[arg-type]
    return DataLoader(Stream() if cls is Stream else data, batch_size=size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    'cls, size, ranks, first, text',
    [
        (None, 2, 1, 4, None),
        (None, 4, 1, 4, None),
        (None, 3, 1, 3, '1 sample(s) of the epoch are trained on again'),
        (None, 2, 2, 2, None),
        (Pairs, 2, 1, 4, None),
        (Pairs, 4, 1, 4, 'Pairs makes other batches now'),
        (Pairs, 1, 2, 2, 'Pairs makes other batches now'),
        (Untold, 2, 1, 4, None),
        (Untold, 2, 2, 0, 'the epoch begins anew: Untold does not tell its batch size'),
        (Stream, 2, 1, 0, 'the epoch begins anew: its dataset draws samples by itself'),
    ],
)
def test_what_is_passed_over(cls: Any, size: int, ranks: int, first: int, text: str | None) -> None:
    """Two batches of two samples are done, by one rank; the sampler here gives every rank the same."""
    before = loop_of(loader_of(cls, 2))
    position = position_of(before, 6 + 2, 1, 1)
    assert position is not None
    loop = loop_of(loader_of(cls, size))
    lost = go_on(loop, position, 1, 0, ranks)
    assert next(iter(loop.dataloader))[0] == first
    assert next(iter(loop.dataloader))[0] == 0
    assert lost is None if text is None else text in str(lost)
    assert loop.iter == len(loop.dataloader) + first // size


def test_no_position() -> None:
    loop = loop_of(loader_of(None, 2))
    assert position_of(loop, 6, 1, 1) is None
    assert position_of(SimpleNamespace(dataloader=loop.dataloader), 8, 1, 1) is None
