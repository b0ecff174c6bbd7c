"""A run by iterations that was broken goes on at its place: what was trained on is drawn by the sampler, not loaded."""

import multiprocessing
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mmengine.registry import LOOPS
from mmengine.runner import IterBasedTrainLoop, loops
from torch.utils.data import IterableDataset

from tests.distributed.cases import Faults, merged
from tests.distributed.ranks import run_ranks
from tests.distributed.test_within_epoch import Noisy, Watch, watched
from tests.models import toy_batch
from tests.vectors import Vectors, loader, vector_runner

pytestmark = pytest.mark.distributed

ITERATIONS, SAMPLES = 12, 2
# Passes of 5 batches: the first place is within one, the second at an end, the last within the third.
PLACES = [3, 10, 11]


class Augmented(Vectors):
    """Notes what is loaded, also by workers, and draws augmentations."""

    def __init__(self, size: int, notes: str) -> None:
        super().__init__(size)
        self.notes = notes

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        with open(self.notes, 'a') as file:
            file.write(f'{index}\n')
        sample = super().__getitem__(index)
        return {**sample, 'inputs': sample['inputs'] * (1 + random.random() / 9) + np.random.rand() / 9}

    def get_data_info(self, index: int) -> dict[str, int]:
        return dict(width=index % 2, height=1)


@LOOPS.register_module(force=True)
class FromTheFirst(IterBasedTrainLoop):
    """Has a run of its own, which passes over nothing."""

    def run(self) -> None:
        self.runner.call_hook('before_train')
        self.runner.call_hook('before_train_epoch')
        self.runner.model.train()
        while self._iter < self._max_iters:
            self.run_iter(next(self.dataloader_iterator))
        self.runner.call_hook('after_train')


@LOOPS.register_module(force=True)
class Wrapped(IterBasedTrainLoop):
    """Has a run of its own, which asks for MMEngine's."""

    def run(self) -> Any:
        return super().run()


class Stream(IterableDataset):
    """Draws samples by itself."""

    def __init__(self, notes: str) -> None:
        self.notes = notes

    def __len__(self) -> int:
        return 1000

    def __iter__(self) -> Any:
        for index in range(1000):
            with open(self.notes, 'a') as file:
                file.write(f'{index}\n')
            yield {name: value[0] for name, value in toy_batch(index, size=1).items()}


CASES: dict[str, dict[str, Any]] = {
    'infinite': dict(sampler=dict(type='InfiniteSampler')),
    'by epochs': dict(sampler=dict(type='DefaultSampler', shuffle=True)),
    'by shapes': dict(
        sampler=dict(type='DefaultSampler', shuffle=True), batch_sampler=dict(type='mmdet.AspectRatioBatchSampler')
    ),
    'infinite by shapes': dict(
        sampler=dict(type='InfiniteSampler'), batch_sampler=dict(type='mmdet.AspectRatioBatchSampler')
    ),
    # Rank 0 has a batch more.
    'uneven': dict(sampler=dict(type='DefaultSampler', shuffle=True, round_up=False), more=1),
    'workers': dict(sampler=dict(type='InfiniteSampler'), num_workers=1, persistent_workers=True),
}


def trained(folder: str, more: int = 0, **changes: Any) -> tuple[Watch, list[int], Any]:
    """Losses, samples that were loaded in their order, and the runner."""
    # MMEngine waits two seconds between two passes.
    loops.time = SimpleNamespace(sleep=lambda seconds: None)
    torch.manual_seed(0)
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    os.makedirs(folder, exist_ok=True)
    notes = f'{folder}/loaded {dist.get_rank()}'
    Path(notes).unlink(missing_ok=True)
    own = {name: changes.pop(name) for name in ('sampler', 'batch_sampler', 'num_workers') if name in changes}
    own |= {name: changes.pop(name) for name in ('persistent_workers', 'batch_size', 'dataset') if name in changes}
    if own.get('dataset') == 'stream':
        own['dataset'] = Stream(notes)
    settings: dict[str, Any] = dict(
        train_dataloader={**loader(Augmented(5 * SAMPLES * 2 + more, notes)), 'batch_size': SAMPLES, **own},
        val_dataloader=loader(Augmented(4, f'{folder}/val')),
        train_cfg=dict(by_epoch=False, max_iters=ITERATIONS, val_interval=5),
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=1, by_epoch=False)),
        param_scheduler=dict(type='LinearLR', start_factor=0.1, by_epoch=False, end=20),
    )
    runner = vector_runner(folder, Noisy(), **{**settings, **changes})
    # Ranks are daemons of the test, which may have no children.
    with patch.dict(multiprocessing.current_process()._config, daemon=False):
        watch = watched(runner, None)
    return watch, [int(line) for line in Path(notes).read_text().split()], runner


def broken(folder: str, cases: list[str], places: list[int]) -> Faults:
    """After some number of iterations."""
    found: Faults = {}
    for case in cases:
        whole, loaded, _ = trained(f'{folder}/{case}', **CASES[case])
        for done in places:
            faults = found[f'{case}, after {done}'] = []
            path = f'{folder}/{case}/iter_{done}.pth'
            again, now, runner = trained(f'{folder}/{case} {done}', load_from=path, resume=True, **CASES[case])
            faults += differences(whole, loaded, again, now, done, exact='workers' not in case)
            faults += [] if runner.iter == ITERATIONS else [f'ended at {runner.iter}']
    return found


def differences(whole: Watch, loaded: list[int], again: Watch, now: list[int], done: int, exact: bool) -> list[str]:
    wanted = loaded[done * SAMPLES :]
    if not exact:
        # Workers draw other augmentations, and load ahead of the last batch.
        count = (ITERATIONS - done) * SAMPLES
        return [] if now[:count] == wanted[:count] and len(now) < len(loaded) else [f'loaded {now}, not {wanted}']
    faults = [] if again.losses == whole.losses[done:] else [f'{again.losses}, not {whole.losses[done:]}']
    # A pass that ends with a batch of another size has no 2 samples for each.
    if loaded[len(loaded) - len(now) :] != now or len(now) > SAMPLES * (ITERATIONS - done):
        faults.append(f'loaded {now}, not the end of {loaded}')
    return faults + ([] if again.numbers == whole.numbers[done:] else [f'numbers {again.numbers}'])


@pytest.mark.parametrize(
    'ranks, cases, places',
    [
        (2, ['infinite', 'by epochs'], [11]),
        pytest.param(2, list(CASES), PLACES, marks=pytest.mark.slow),
        pytest.param(1, list(CASES), PLACES, marks=pytest.mark.slow),
    ],
)
def test_every_batch_once(tmp_path: Path, ranks: int, cases: list[str], places: list[int]) -> None:
    for case, faults in merged(run_ranks(ranks, broken, str(tmp_path), cases, places)).items():
        assert not faults, f'{case}: {faults}'


INFINITE = dict(sampler=dict(type='InfiniteSampler'))


def of_all_ranks(folder: str, **changes: Any) -> list[int]:
    _, loaded, _ = trained(folder, **{**INFINITE, **changes})
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, loaded)
    # The order of the stream that all share.
    return [index for one in zip(*everyones, strict=True) for index in one]


@pytest.mark.parametrize('numbers', [[2, 1], pytest.param([1, 4, 2, 1], marks=pytest.mark.slow)])
def test_any_number_of_ranks_goes_on_in_one_stream(tmp_path: Path, numbers: list[int]) -> None:
    """Each start makes four more iterations; what all have loaded is one stream, without a gap or a sample twice."""
    found: list[int] = []
    for start, ranks in enumerate(numbers):
        changes: dict[str, Any] = dict(train_cfg=dict(by_epoch=False, max_iters=4 * (start + 1)))
        if start:
            changes |= dict(load_from=str(tmp_path / f'{start - 1}' / f'iter_{4 * start}.pth'), resume=True)
        found += run_in(ranks, str(tmp_path / f'{start}'), changes)
    one_by_one = dict(batch_size=1, train_cfg=dict(by_epoch=False, max_iters=len(found)))
    assert found == run_in(1, str(tmp_path / 'whole'), one_by_one)


def run_in(ranks: int, folder: str, changes: dict[str, Any]) -> list[int]:
    return run_ranks(ranks, from_dict, folder, changes)[0]


def from_dict(folder: str, changes: dict[str, Any]) -> list[int]:
    return of_all_ranks(folder, **changes)


def others(folder: str) -> Faults:
    """Loops with a run of their own, a dataset that draws by itself, a file of another program."""
    found: Faults = {}
    for case, changes, loaded_again in [
        ('Wrapped', dict(train_cfg=dict(type='Wrapped', max_iters=ITERATIONS, val_interval=100), **INFINITE), True),
        ('stream', dict(dataset='stream', sampler=None), True),
        ('without a position', INFINITE, False),
        ('by epochs without a position', dict(sampler=dict(type='DefaultSampler', shuffle=True)), False),
    ]:
        faults = found[case] = []
        whole, loaded, _ = trained(f'{folder}/{case}', **changes)
        path = f'{folder}/{case}/iter_7.pth'
        if 'without' in case:
            without_position(path)
        again, now, runner = trained(f'{folder}/{case} again', load_from=path, resume=True, **changes)
        faults += [] if again.losses == whole.losses[7:] else [f'{again.losses}, not {whole.losses[7:]}']
        wanted = loaded if loaded_again else loaded[7 * SAMPLES :]
        faults += [] if now == wanted else [f'loaded {now}, not {wanted}']
    return found


def without_position(path: str) -> None:
    if dist.get_rank() == 0:
        checkpoint = torch.load(path, weights_only=True)
        del checkpoint['meta']['position'], checkpoint['meta']['world_size']
        torch.save(checkpoint, path)
    dist.barrier()


@pytest.mark.slow
def test_what_cannot_be_passed_over_is_loaded_again(tmp_path: Path) -> None:
    for case, faults in merged(run_ranks(2, others, str(tmp_path))).items():
        assert not faults, f'{case}: {faults}'


def from_the_first(folder: str) -> int:
    changes: dict[str, Any] = dict(train_cfg=dict(type='FromTheFirst', max_iters=ITERATIONS), **INFINITE)
    _, loaded, _ = trained(folder, **changes)
    path = f'{folder}/iter_7.pth'
    again, now, runner = trained(f'{folder}/again', load_from=path, resume=True, **changes)
    assert runner.iter == ITERATIONS
    assert now == loaded[: 5 * SAMPLES]
    return len(again.losses)


def test_a_loop_that_begins_as_it_likes(tmp_path: Path) -> None:
    assert run_ranks(1, from_the_first, str(tmp_path)) == [5]
