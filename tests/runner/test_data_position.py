"""What is not exact where a run goes on within an epoch, and is said."""

from types import SimpleNamespace
from typing import Any

import pytest
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from mmzero._compat import InfiniteIterator
from mmzero.runner.data_position import go_on, position_of
from mmzero.runner.data_stream import DataStream, runs_by_iterations, start_later


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


@pytest.mark.parametrize('persistent', [False, True])
def test_workers_get_the_same_batches(persistent: bool) -> None:
    loader = DataLoader(list(range(12)), batch_size=2, num_workers=1, persistent_workers=persistent)  # type: ignore[arg-type]
    loop = loop_of(loader)
    assert go_on(loop, dict(batches=4, samples=2), 1, 0, 1) is None
    assert [batch.tolist() for batch in loader] == [[8, 9], [10, 11]]
    assert len(list(loader)) == 6


def stream_of(cls: Any, size: int) -> Any:
    """A loop by iterations after 4 of them."""
    loop = IterBasedTrainLoop.__new__(IterBasedTrainLoop)
    loader = DataLoader(list(range(12)), sampler=RandomSampler(range(12)), batch_size=2)  # type: ignore[arg-type]
    loader = loader if cls is RandomSampler else loader_of(cls, size)
    vars(loop).update(dataloader=loader, _iter=4)
    loop.dataloader_iterator = DataStream(InfiniteIterator(loader), lambda: None)
    return loop


ANEW = 'the epoch begins anew: Untold does not tell its batch size'


@pytest.mark.parametrize(
    'cls, size, place, ranks, first, then, text',
    [
        (None, 2, [0, 2], 1, 4, (0, 3), None),
        (None, 2, [1, 2], 1, 4, (1, 3), None),
        (None, 2, [0, 6], 1, 0, (1, 1), None),
        (None, 4, [0, 2], 1, 4, (0, 2), None),
        (None, 3, [0, 2], 1, 3, (0, 2), '1 sample(s) of the epoch are trained on again'),
        (None, 2, [0, 2], 2, 2, (0, 2), None),
        # More than there is, since ranks that were more had rounded up.
        (None, 2, [0, 7], 1, 2, (1, 2), None),
        (Pairs, 2, [0, 2], 1, 4, (0, 3), None),
        (Pairs, 4, [0, 2], 1, 4, (0, 2), 'Pairs makes other batches now'),
        (Untold, 2, [0, 2], 1, 4, (0, 3), None),
        (Untold, 2, [1, 2], 2, 0, (1, 1), ANEW),
        (
            Stream,
            2,
            [0, 2],
            1,
            8,
            (0, 5),
            '4 batches are loaded to be passed over: the dataset draws samples by itself',
        ),
        (RandomSampler, 2, [0, 2], 1, None, (0, 3), 'RandomSampler draws from the random numbers of its process'),
    ],
)
def test_what_a_stream_passes_over(
    cls: Any, size: int, place: list[int], ranks: int, first: int | None, then: tuple[int, int], text: str | None
) -> None:
    """Saved by one rank in batches of two."""
    loop = stream_of(cls, size)
    lost = go_on(loop, dict(places=[place], samples=None if cls is Untold else 2), 1, 0, ranks)
    stream = loop.dataloader_iterator
    for _ in range(4):
        # As MMEngine's loop does.
        next(stream)
    batch = next(stream)
    assert first is None or int(batch[0]) == first
    assert stream.place == then
    assert lost is None if text is None else text in str(lost)


def test_ranks_that_were_apart() -> None:
    loop = stream_of(None, 2)
    assert go_on(loop, dict(places=[[0, 5], [1, 0]], samples=4), 2, 1, 2) is None
    assert loop.dataloader_iterator.place == (1, 0)
    loop = stream_of(None, 2)
    lost = go_on(loop, dict(places=[[0, 2], [0, 1]], samples=4), 2, 0, 1)
    assert 'ranks were at different places of their data' in str(lost)
    assert loop.dataloader_iterator.place == (0, 4)


class Loaded(list):
    def __init__(self, size: int) -> None:
        super().__init__(range(size))
        self.taken: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        self.taken.append(index)
        return super().__getitem__(index)


def test_batches_that_are_passed_over_are_not_loaded() -> None:
    loop, data = stream_of(None, 2), Loaded(12)
    loop.dataloader = DataLoader(data, batch_size=2)  # type: ignore[arg-type]
    loop.dataloader_iterator = stream = DataStream(InfiniteIterator(loop.dataloader), lambda: None)
    go_on(loop, dict(places=[[0, 4]], samples=2), 1, 0, 1)
    assert [next(stream) for _ in range(4)] == [None] * 4
    assert next(stream).tolist() == [8, 9]
    assert data.taken == [8, 9]


def test_workers_that_have_begun_are_told() -> None:
    """A loop that was built without resume=True, on which resume() is called."""
    loop = stream_of(None, 2)
    loop.dataloader = loader = DataLoader(list(range(12)), batch_size=2, num_workers=1)  # type: ignore[arg-type]
    loop.dataloader_iterator = stream = DataStream(InfiniteIterator(loader), lambda: None)
    lost = go_on(loop, dict(places=[[0, 4]], samples=2), 1, 0, 1)
    assert '4 batches are loaded to be passed over: workers of the loader have begun to load' in str(lost)
    assert [next(stream).tolist() for _ in range(5)][-1] == [8, 9]
    start_later(loader)
    loop.dataloader_iterator = DataStream(InfiniteIterator(loader), lambda: None)
    assert go_on(loop, dict(places=[[0, 4]], samples=2), 1, 0, 1) is None


def test_a_loader_without_a_batch_ends() -> None:
    loop = stream_of(None, 2)
    loop.dataloader = DataLoader([1], batch_size=2, drop_last=True)  # type: ignore[arg-type]
    loop.dataloader_iterator = DataStream(InfiniteIterator(loop.dataloader), lambda: None)
    go_on(loop, dict(places=[[0, 4]], samples=2), 1, 0, 1)
    assert loop.dataloader_iterator.place == (0, 0)


class OwnRun(IterBasedTrainLoop):
    def run(self) -> None:
        pass


class OwnIteration(IterBasedTrainLoop):
    def run_iter(self, data_batch: Any) -> None:
        pass


@pytest.mark.parametrize(
    'loop, wanted',
    [
        (dict(by_epoch=False, max_iters=2), True),
        (dict(by_epoch=True, max_epochs=2), False),
        (dict(type='IterBasedTrainLoop', max_iters=2), True),
        (dict(type=OwnRun, max_iters=2), False),
        (dict(type=OwnIteration, max_iters=2), True),
        (dict(type='NoLoop'), False),
        (OwnRun.__new__(OwnRun), False),
        (OwnIteration.__new__(OwnIteration), True),
    ],
)
def test_loops_that_take_batches_as_mmengines_does(loop: Any, wanted: bool) -> None:
    assert runs_by_iterations(loop) is wanted


def test_a_loop_of_its_own_is_told() -> None:
    loop = OwnRun.__new__(OwnRun)
    vars(loop).update(dataloader=loader_of(None, 2), _iter=4, dataloader_iterator=iter(()))
    assert 'OwnRun has a run() of its own' in str(go_on(loop, None, 1, 0, 1))
