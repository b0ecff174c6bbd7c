"""A run that was broken within an epoch goes on there: each batch once, and the losses of the unbroken run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.hooks import Hook
from mmengine.registry import DATA_SAMPLERS
from torch import nn

from tests.distributed.cases import Faults, merged
from tests.distributed.ranks import run_ranks
from tests.models import ToyModel
from tests.vectors import Vectors, loader, vector_runner

pytestmark = pytest.mark.distributed

BATCHES, SAMPLES = 5, 2


class Noisy(ToyModel):
    """Draws in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        return super().forward(self.dropout(inputs), labels, mode)


class Drawn(Vectors):
    """Notes what is loaded, and draws from Python's numbers."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.loaded: list[int] = []

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.loaded.append(index)
        return super().__getitem__(index)


@DATA_SAMPLERS.register_module(force=True)
class ByParity:
    """Batches of even numbers or of odd ones, as mmdet's AspectRatioBatchSampler has wide images or high ones."""

    def __init__(self, sampler: Any, batch_size: int) -> None:
        self.sampler, self.batch_size = sampler, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        waiting: tuple[list[int], list[int]] = ([], [])
        for index in self.sampler:
            group = waiting[index % 2]
            group.append(index)
            if len(group) == self.batch_size:
                yield list(group)
                group.clear()
        left = [*waiting[0], *waiting[1]]
        for start in range(0, len(left), self.batch_size):
            yield left[start : start + self.batch_size]

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.batch_size)


@DATA_SAMPLERS.register_module(force=True)
class Untold(ByParity):
    """Has no size of a batch, as where there is one for each of several datasets."""

    def __init__(self, sampler: Any, batch_size: int) -> None:
        super().__init__(sampler, batch_size)
        self.batch_size: Any = [batch_size]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(ByParity(self.sampler, self.batch_size[0]))

    def __len__(self) -> int:
        return len(ByParity(self.sampler, self.batch_size[0]))


class Watch(Hook):
    """Notes losses and numbers of batches, and breaks the run off."""

    def __init__(self, stop: int | None) -> None:
        self.stop, self.losses, self.numbers = stop, [], []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.losses.append(float(outputs['loss'].detach()))
        self.numbers.append(batch_idx)
        if runner.iter + 1 == self.stop:
            raise KeyboardInterrupt


def watched(runner: Any, stop: int | None) -> Watch:
    """Train until the end, or until a number of iterations."""
    watch = Watch(stop)
    runner.register_hook(watch, 'LOWEST')
    try:
        runner.train()
    except KeyboardInterrupt:
        dist.barrier()
    return watch


def trained(
    folder: str, stop: int | None = None, ranks: int | None = None, batches: str | None = None, **changes: Any
) -> tuple[Watch, Drawn, Any]:
    torch.manual_seed(0)
    ranks = ranks or dist.get_world_size()
    train = loader(Drawn(BATCHES * SAMPLES * ranks))
    train['sampler']['shuffle'] = True
    train['batch_size'] = SAMPLES * ranks // dist.get_world_size()
    train |= {} if batches is None else dict(batch_sampler=dict(type=batches))
    settings: dict[str, Any] = dict(
        train_dataloader=train,
        train_cfg=dict(by_epoch=True, max_epochs=3, val_interval=1),
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=1, by_epoch=False)),
        param_scheduler=dict(type='LinearLR', start_factor=0.1, by_epoch=False, end=20),
    )
    runner = vector_runner(folder, Noisy(), **{**settings, **changes})
    watch = watched(runner, stop)
    # The runner has a copy of its own.
    return watch, runner.train_dataloader.dataset, runner


def broken(folder: str, places: list[int], batches: str | None = None) -> Faults:
    """After some number of batches."""
    whole, data, runner = trained(f'{folder}/whole', batches=batches)
    assert len(data.loaded) == 3 * BATCHES * SAMPLES
    found: Faults = {}
    for done in places:
        faults = found[f'after {done}'] = []
        path = f'{folder}/whole/iter_{done}.pth'
        again, loaded, resumed = trained(f'{folder}/{done}', batches=batches, load_from=path, resume=True)
        if again.losses != whole.losses[done:]:
            faults.append(f'{again.losses}, not {whole.losses[done:]}')
        if loaded.loaded != data.loaded[done * SAMPLES :]:
            faults.append(f'loaded {loaded.loaded}, not {data.loaded[done * SAMPLES :]}')
        if again.numbers != whole.numbers[done:]:
            faults.append(f'numbers {again.numbers}, not {whole.numbers[done:]}')
        if (resumed.iter, resumed.epoch) != (runner.iter, runner.epoch):
            faults.append(f'ended at {resumed.iter}, {resumed.epoch}')
    return found


SECOND = list(range(BATCHES + 1, 2 * BATCHES + 1))


@pytest.mark.parametrize(
    'ranks, places', [(2, [SECOND[1], SECOND[-1]]), *(pytest.param(n, SECOND, marks=pytest.mark.slow) for n in (1, 2))]
)
def test_every_batch_once(tmp_path: Path, ranks: int, places: list[int]) -> None:
    for case, faults in merged(run_ranks(ranks, broken, str(tmp_path), places)).items():
        assert not faults, f'{case}: {faults}'


@pytest.mark.parametrize('batches', ['ByParity', 'Untold'])
def test_with_a_batch_sampler(tmp_path: Path, batches: str) -> None:
    for case, faults in merged(run_ranks(2, broken, str(tmp_path), [SECOND[2]], batches)).items():
        assert not faults, f'{case}: {faults}'


def run_of(folder: str, first: str, ranks: int) -> list[int]:
    _, data, runner = trained(folder, ranks=ranks, load_from=first, resume=True)
    assert runner.iter == 3 * BATCHES
    loaded: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(loaded, data.loaded)
    return [index for own in loaded for index in own]


@pytest.mark.slow
def test_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    """The samples that are left are the same, whichever rank has them."""
    run_ranks(2, run_until, str(tmp_path / 'first'))
    wanted = run_ranks(2, run_of, str(tmp_path / '2'), str(tmp_path / 'first/iter_7.pth'), 2)[0]
    assert len(wanted) == 8 * SAMPLES * 2
    for ranks in (1, 4):
        found = run_ranks(ranks, run_of, str(tmp_path / str(ranks)), str(tmp_path / 'first/iter_7.pth'), 2)[0]
        assert sorted(found) == sorted(wanted)


def run_until(folder: str) -> None:
    trained(folder, stop=7)
