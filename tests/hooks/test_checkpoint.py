"""What is outdated goes once the next checkpoint is there."""

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.evaluator import BaseMetric
from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import HOOKS

from mmzero.checkpoint import state_of
from mmzero.checkpoint.sharded import background
from mmzero.errors import CheckpointError
from mmzero.hooks import ZeroCheckpointHook, keeping_the_last
from mmzero.runner import checkpoints
from mmzero.runner.checkpoints import CheckpointMixin
from mmzero.runner.resuming import latest_checkpoint
from tests.vectors import vector_runner


class Rising(BaseMetric):
    """A score that is better each time."""

    score = 0

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(1)

    def compute_metrics(self, results: list) -> dict[str, int]:
        Rising.score += 1
        return dict(score=Rising.score)


def runner_of(folder: Path, shards: bool, export: dict | None = None, **hook: Any) -> Any:
    saving = dict(format='sharded', **(export or {})) if shards else dict()
    return vector_runner(
        folder,
        train_cfg=dict(by_epoch=True, max_epochs=4, val_interval=1),
        val_evaluator=dict(type=Rising),
        default_hooks=dict(checkpoint=dict(dict(type='CheckpointHook', interval=1), **hook)),
        cfg=dict(model_wrapper_cfg=dict(type='ZeroModelWrapper', stage=3), checkpoint=saving),
    )


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(('epoch', 'best')))


BEST = dict(max_keep_ckpts=1, save_best='score', rule='greater')


@pytest.mark.parametrize('shards, end', [(False, '.pth'), (True, '')])
def test_some_are_kept(tmp_path: Path, group: None, shards: bool, end: str) -> None:
    runner_of(tmp_path, shards, **BEST).train()
    assert names_in(tmp_path) == [f'best_score_epoch_4{end}', f'epoch_4{end}']
    assert (tmp_path / 'last_checkpoint').read_text() == str(tmp_path / f'epoch_4{end}')


@pytest.mark.parametrize('fails', ['epoch_3', 'best_score_epoch_3'])
def test_a_save_that_fails_costs_none(tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    real = CheckpointMixin.save_checkpoint

    def save(self: Any, out_dir: str, filename: str, *args: Any, **kwargs: Any) -> None:
        if filename == f'{fails}.pth':
            raise OSError('No space left on device')
        real(self, out_dir, filename, *args, **kwargs)

    monkeypatch.setattr(CheckpointMixin, 'save_checkpoint', save)
    with pytest.raises(OSError, match='No space left'):
        runner_of(tmp_path, False, **BEST).train()
    last = 'epoch_2' if fails == 'epoch_3' else 'epoch_3'
    assert names_in(tmp_path) == ['best_score_epoch_2.pth', f'{last}.pth']
    assert (tmp_path / 'last_checkpoint').read_text() == str(tmp_path / f'{last}.pth')


def test_kept_ones_are_those_of_mmengines_hook(tmp_path: Path, group: None) -> None:
    runner_of(tmp_path, False, max_keep_ckpts=2, interval=2, save_last=False).train()
    assert names_in(tmp_path) == ['epoch_2.pth', 'epoch_4.pth']


def test_a_projects_hook_stays_one() -> None:
    class Own(CheckpointHook):
        pass

    hook = Own(interval=1)
    assert keeping_the_last(hook) is hook
    assert isinstance(hook, Own) and isinstance(hook, ZeroCheckpointHook)
    assert keeping_the_last(hook) is hook
    assert type(HOOKS.build(dict(type='CheckpointHook'))) is CheckpointHook


@pytest.mark.parametrize('asynchronous', [False, True])
@pytest.mark.parametrize(
    'export, wanted',
    [
        ('last', ['epoch_4.pth']),
        ('best', ['best_score_epoch_4.pth']),
        ('all', ['best_score_epoch_4.pth', 'epoch_4.pth']),
    ],
)
def test_exports(tmp_path: Path, group: None, export: str, wanted: list[str], asynchronous: bool) -> None:
    saving = dict(export=export, export_dtype='bfloat16', async_save=asynchronous)
    runner = runner_of(tmp_path, True, saving, published_keys=['meta', 'state_dict'], **BEST)
    runner.train()
    found = names_in(tmp_path)
    published = [name for name in found if re.search(r'-[0-9a-f]{8}\.pth$', name)]
    assert len(published) == len(wanted)
    assert [name for name in found if name.endswith('.pth') and name not in published] == wanted
    for name in [*wanted, *published]:
        file = torch.load(tmp_path / name, weights_only=True)
        assert file.keys() == {'meta', 'state_dict'}
        for key, value in runner.sharded.engine.model_state().items():
            assert torch.equal(file['state_dict'][key], value.bfloat16()), key


@pytest.mark.parametrize('fails', ['epoch_3', 'epoch_4', 'best_score_epoch_3', 'best_score_epoch_4'])
def test_saves_that_fail_beside_training(
    tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """What they were to replace stays until the next one is there, and no longer; the end exports what there is."""
    real = background.write_sharded

    def write(tensors: Any, rest: Any, target: Path, *args: Any) -> None:
        if target.name == fails:
            raise CheckpointError('No space left on device')
        real(tensors, rest, target, *args)

    monkeypatch.setattr(background, 'write_sharded', write)
    kind = 'best' if fails.startswith('best') else 'last'
    runner_of(tmp_path, True, dict(export=kind, async_save=True), **BEST).train()
    last = 'epoch_3' if fails == 'epoch_4' else 'epoch_4'
    best = 'best_score_epoch_3' if fails == 'best_score_epoch_4' else 'best_score_epoch_4'
    exported = f'{best if kind == "best" else last}.pth'
    assert [name for name in names_in(tmp_path) if not name.endswith('.part')] == sorted([best, last, exported])
    assert (tmp_path / 'last_checkpoint').read_text() == str(tmp_path / last)


def test_a_folder_that_was_moved(tmp_path: Path, group: None) -> None:
    """What is noted as the last checkpoint is not there any more."""
    runner_of(tmp_path / 'here', True).train()
    (tmp_path / 'here').rename(tmp_path / 'there')
    assert (tmp_path / 'there' / 'last_checkpoint').read_text() == str(tmp_path / 'here' / 'epoch_4')
    assert latest_checkpoint(str(tmp_path / 'there')) == (str(tmp_path / 'there' / 'epoch_4'), [])


def test_a_save_after_training_is_waited_for(tmp_path: Path, group: None) -> None:
    runner = runner_of(tmp_path, True, dict(async_save=True))
    runner.train()
    runner.save_checkpoint(str(tmp_path), 'mine.pth')
    assert state_of(tmp_path / 'mine').fault is None


def test_a_link_is_removed_and_not_followed(tmp_path: Path, group: None) -> None:
    runner = runner_of(tmp_path / 'run', True, max_keep_ckpts=1)
    runner.register_hook(Links())
    runner.train()
    assert names_in(tmp_path / 'run') == ['epoch_4']
    assert state_of(tmp_path / 'run-epoch_2').fault is None


class Links(Hook):
    """Moves a checkpoint to another disk, and leaves a link."""

    priority = 'LOWEST'

    def after_train_epoch(self, runner: Any) -> None:
        if runner.epoch + 1 == 2:
            folder = Path(runner.work_dir)
            elsewhere = folder.with_name('run-epoch_2')
            (folder / 'epoch_2').rename(elsewhere)
            (folder / 'epoch_2').symlink_to(elsewhere)


@pytest.mark.parametrize('asynchronous', [False, True])
def test_an_export_that_fails_beside_training(
    tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """Rank 0 alone would leave, and the others wait for it."""

    def full(*_: Any) -> None:
        raise CheckpointError('No space left on device')

    monkeypatch.setattr(checkpoints, 'export_weights', full)
    runner = runner_of(tmp_path, True, dict(export='all', async_save=asynchronous))
    if asynchronous:
        runner.train()
        assert runner.epoch == 4
    else:
        with pytest.raises(CheckpointError, match='No space left'):
            runner.train()


class Leaves(Hook):
    """As where a job is about to be ended: saves, and exits."""

    priority = 'LOWEST'

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        runner.save_checkpoint(runner.work_dir, 'mine.pth')
        raise SystemExit(0)


def test_a_save_before_an_exit_is_waited_for(tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = background.write_sharded

    def slow(*args: Any) -> None:
        time.sleep(0.5)
        real(*args)

    monkeypatch.setattr(background, 'write_sharded', slow)
    runner = runner_of(tmp_path, True, dict(async_save=True))
    runner.register_hook(Leaves())
    with pytest.raises(SystemExit):
        runner.train()
    assert state_of(tmp_path / 'mine').fault is None
