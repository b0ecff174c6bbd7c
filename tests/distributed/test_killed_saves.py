"""Ranks are killed at random moments of saves: the next start goes on from a complete one, on the unbroken curve."""

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.hooks import Hook

from tests.distributed.ranks import _free_port, _on_rank, run_ranks
from tests.models import ToyModel
from tests.vectors import Vectors, loader, vector_runner

pytestmark = pytest.mark.distributed

RANKS = 2


class Curve(Hook):
    """Writes down the loss of each epoch, which is one step long."""

    def __init__(self, path: str) -> None:
        self.path = path

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if runner.rank == 0:
            with open(self.path, 'a') as file:
                file.write(json.dumps([runner.iter, float(outputs['loss'].detach())]) + '\n')


def curve(folder: str, epochs: int, asynchronous: bool, interval: int = 1, resume: bool = True) -> None:
    torch.manual_seed(0)
    data = loader(Vectors(2 * RANKS))
    data['sampler']['shuffle'] = True
    wrapper = dict(wrap_policy=dict(type='ModuleClassPolicy', classes=['Block']), find_unused_parameters=True)
    runner = vector_runner(
        folder,
        ToyModel(),
        train_dataloader=data,
        train_cfg=dict(by_epoch=True, max_epochs=epochs),
        val_cfg=None,
        val_dataloader=None,
        val_evaluator=None,
        resume=resume,
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=interval, max_keep_ckpts=2)),
        cfg=dict(
            model_wrapper_cfg=dict(type='ZeroModelWrapper', stage=3, **wrapper),
            checkpoint=dict(format='sharded', async_save=asynchronous),
        ),
    )
    runner.register_hook(Curve(f'{folder}/curve.jsonl'))
    runner.train()


def losses(path: Path) -> list[tuple[int, float]]:
    """What was written down; a line may have been cut off."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(tuple(json.loads(line)))
        except ValueError:
            continue
    return found


def last_saved(folder: Path) -> str:
    note = folder / 'last_checkpoint'
    return note.read_text() if note.exists() else ''


def killed_once(folder: Path, length: int, asynchronous: bool, chance: random.Random) -> None:
    """Start the ranks, and kill one or all of them at some moment after the first save, in one of the next."""
    context: Any = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['tests.distributed.preload'])
    results, port = context.Queue(), _free_port()
    arguments = (str(folder), length, asynchronous)
    ranks = [
        context.Process(
            target=_on_rank, args=(rank, RANKS, port, 'gloo', results, curve, arguments, dict(os.environ)), daemon=True
        )
        for rank in range(RANKS)
    ]
    before = last_saved(folder)
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + 120
    while last_saved(folder) == before:
        assert time.monotonic() < deadline, 'the ranks do not start'
        assert all(rank.is_alive() for rank in ranks), results.get(timeout=5)
        time.sleep(0.01)
    time.sleep(chance.random() * 0.5)
    for rank in chance.choice(([ranks[0]], [ranks[1]], ranks)):
        os.kill(rank.pid, signal.SIGKILL)
    for rank in ranks:
        rank.join(timeout=0.2)
        if rank.is_alive():
            os.kill(rank.pid, signal.SIGKILL)
            rank.join()


@pytest.mark.parametrize('asynchronous', [False, True])
@pytest.mark.parametrize('times', [1, pytest.param(25, marks=pytest.mark.slow)])
def test_a_killed_run_joins_the_unbroken_curve(tmp_path: Path, asynchronous: bool, times: int) -> None:
    # Faster machines take more steps before they are killed.
    length = 60 * (times + 1)
    run_ranks(RANKS, curve, str(tmp_path / 'whole'), length, False, length, False)
    unbroken = dict(losses(tmp_path / 'whole' / 'curve.jsonl'))
    chance, folder = random.Random(times + asynchronous), tmp_path / 'broken'
    folder.mkdir()
    for _ in range(times):
        killed_once(folder, length, asynchronous, chance)
    # Each start has saved once before it was killed; the last one is not killed.
    saved = max(step for step, _ in losses(folder / 'curve.jsonl'))
    assert saved >= times - 1
    run_ranks(RANKS, curve, str(folder), saved + 4, asynchronous)
    found = losses(folder / 'curve.jsonl')
    assert found[-1][0] == saved + 3
    wrong = [(step, loss) for step, loss in found if unbroken[step] != loss]
    assert not wrong, wrong[:5]
    # Each start goes on from the last complete checkpoint: it takes no more than a few steps again.
    steps = [step for step, _ in found]
    back = [before - after + 1 for before, after in zip(steps, steps[1:], strict=False) if after <= before]
    assert all(lost <= 3 for lost in back), back
