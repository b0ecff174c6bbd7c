"""Ranks that torchrun has started again go on from what their run has saved, and from nothing else."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import run_ranks
from tests.distributed.test_within_epoch import watched
from tests.vectors import Vectors, loader, vector_runner

pytestmark = pytest.mark.distributed

ITERATIONS = 6


def trained(folder: str, stop: int | None, sharded: bool = False, **changes: Any) -> list[int]:
    """The iterations that are done."""
    runner = vector_runner(
        folder,
        train_dataloader=loader(Vectors(40)),
        train_cfg=dict(by_epoch=False, max_iters=ITERATIONS, val_interval=100),
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=2, by_epoch=False, max_keep_ckpts=1)),
        cfg=dict(
            model_wrapper_cfg=dict(type='ZeroModelWrapper', stage=3),
            checkpoint=dict(format='sharded' if sharded else 'full'),
        ),
        **changes,
    )
    return watched(runner, stop).numbers


def again(folder: str, stop: int | None, sharded: bool, changes: dict[str, Any]) -> list[int]:
    return trained(folder, stop, sharded, **changes)


def twice(folder: str) -> list[list[int]]:
    """Two runs of one process."""
    return [trained(folder, 3), trained(folder, 3)]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def become(name: str, attempt: int) -> None:
        monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'none')
        monkeypatch.setenv('TORCHELASTIC_ERROR_FILE', f'{tmp_path}/{name}/attempt_{attempt}/0/error.json')

    return become


@pytest.mark.parametrize('sharded', [False, True])
def test_a_run_goes_on_from_its_own_checkpoint_alone(tmp_path: Path, launch: Any, sharded: bool) -> None:
    def start(name: str, attempt: int, stop: int | None, **changes: Any) -> list[int]:
        launch(name, attempt)
        first, second = run_ranks(2, again, str(tmp_path / 'run'), stop, sharded, changes)
        assert first == second
        return first

    assert start('one', 0, 3) == [0, 1, 2]
    assert start('one', 1, 5) == [2, 3, 4]
    # Another start of torchrun: what lies there is not its own, before it has saved itself.
    assert start('two', 0, 1) == [0]
    assert start('two', 1, 1) == [0]
    assert start('two', 2, 3) == [0, 1, 2]
    # Rather than from the file that it was told to begin with.
    changes = dict(load_from=str(tmp_path / 'run' / ('iter_2' if sharded else 'iter_2.pth')), resume=True)
    assert start('two', 3, 5, **changes) == [2, 3, 4]
    assert start('two', 4, None, **changes) == [4, 5]


def test_runs_of_one_process_are_two(tmp_path: Path, launch: Any) -> None:
    launch('one', 0)
    assert run_ranks(1, twice, str(tmp_path / 'run')) == [[[0, 1, 2], [0, 1, 2]]]
