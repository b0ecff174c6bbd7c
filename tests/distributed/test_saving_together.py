"""Saving is collective: a rank that would wait for ever says so, and all ranks decide alike."""

import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from mmengine.evaluator import BaseMetric
from mmengine.hooks import EarlyStoppingHook, Hook

from mmzero import ZeroModelWrapper, ZeroOptimWrapper, ZeroRunner
from mmzero.engines import meeting
from mmzero.errors import CheckpointError
from tests.distributed.cases import Faults, merged, refused
from tests.distributed.ranks import run_ranks
from tests.models import ToyModel, toy_batch
from tests.vectors import loader, vector_runner

pytestmark = pytest.mark.distributed

STAGES = (0, 1, 2, 3)
FIELDS = dict(wrap_policy=dict(type='ModuleClassPolicy', classes=['Block']), find_unused_parameters=True)


def pair(stage: int) -> tuple[ZeroModelWrapper, ZeroOptimWrapper, Callable[[], Any]]:
    model = ZeroModelWrapper(module=ToyModel(), stage=stage, **FIELDS)
    optim = ZeroOptimWrapper(torch.optim.AdamW(model.parameters(), lr=0.01))
    return model, optim, lambda: model.train_step(toy_batch(0), optim)


def on_one_rank(stage: int, folder: str) -> list[str]:
    """One rank alone gathers or loads, and the other goes on to its next step; each in turn."""
    model, optim, step = pair(stage)
    step()
    saved = model.engine.model_state(), optim.state_dict()
    works: dict[str, Callable[[], Any]] = {
        "gather the model's weights": model.engine.model_state,
        "gather the optimizer's state": optim.state_dict,
        "load the model's weights": lambda: model.engine.load_model_state(saved[0]),
        "load the optimizer's state": lambda: optim.load_state_dict(saved[1]),
    }
    faults: list[str] = []
    for alone, (what, work) in itertools.product((0, 1), works.items()):
        if dist.get_rank() == alone:
            message = (
                f'rank {alone} wants to {what}, but rank {1 - alone} has gone on to its next train_step without it'
            )
            with refused(faults, CheckpointError, message, 'if is_main_process()'):
                work()
        # The other one waits in here for the first.
        step()
        # Nothing is left of the meeting that failed.
        model.engine.model_state(), optim.state_dict()
    return faults


def different_things(stage: int, folder: str) -> list[str]:
    """Each rank gathers, but not the same."""
    model, optim, step = pair(stage)
    step()
    faults: list[str] = []
    with refused(faults, CheckpointError, f'but rank {1 - dist.get_rank()} wants to gather the'):
        (optim.state_dict if dist.get_rank() else model.engine.model_state)()
    dist.barrier()
    return faults


class SavesOnMain(Hook):
    """Saves as hooks of projects do that know DDP only."""

    def __init__(self, where: str, rank: int) -> None:
        self.rank = rank
        self.faults: list[str] = []
        setattr(self, where, self.save)

    def save(self, runner: ZeroRunner, *args: Any, **kwargs: Any) -> None:
        if dist.get_rank() == self.rank:
            with refused(self.faults, CheckpointError, f'rank {self.rank} wants to', 'has gone on to'):
                runner.save_checkpoint(runner.work_dir, 'main.pth')
            with refused(self.faults, CheckpointError, f'rank {self.rank} wants to load nowhere.pth, but'):
                runner.load_checkpoint('nowhere.pth')


def hooks_on_main(stage: int, folder: str) -> list[str]:
    """Wherever a hook saves on one rank alone, that rank finds out and the run could go on."""
    faults: list[str] = []
    for where in ('after_train_iter', 'after_train_epoch', 'before_val', 'after_run'):
        if where == 'before_val' and stage == 0:
            # Ranks that hold the whole model do not wait for each other in val.
            continue
        hook = SavesOnMain(where, 0)
        # What MMEngine gathers itself, such as metrics, is not told from a meeting.
        changes = dict(val_cfg=None, val_dataloader=None, val_evaluator=None) if where != 'before_val' else {}
        runner = vector_runner(
            f'{folder}/{where}',
            stage=stage,
            wrapper=FIELDS,
            launcher='pytorch',
            custom_hooks=[hook],
            default_hooks=dict(checkpoint=None),
            train_cfg=dict(by_epoch=True, max_epochs=2 if where == 'after_train_epoch' else 1, val_interval=1),
            **changes,
        )
        runner.train()
        faults += [f'{where}: {fault}' for fault in hook.faults]
    return faults


class OwnScore(BaseMetric):
    """A score that each rank computes for itself: better and better on rank 1, worse and worse on rank 0."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(0)

    def evaluate(self, size: int) -> dict[str, float]:
        self.calls = getattr(self, 'calls', 0) + 1
        return dict(score=float(self.calls if dist.get_rank() else -self.calls))

    def compute_metrics(self, results: list) -> dict[str, float]:
        return {}


class Seen(Hook):
    """Notes the metrics that hooks are given, and when the run ends."""

    def __init__(self) -> None:
        self.metrics: list[dict] = []

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        self.metrics.append(metrics)


def own_scores(stage: int, folder: str) -> list[str]:
    """The best checkpoint is saved, and the run stopped, on rank 0's score by all ranks."""
    seen = Seen()
    runner = vector_runner(
        f'{folder}/best {stage}',
        stage=stage,
        wrapper=FIELDS,
        launcher='pytorch',
        val_dataloader=loader(),
        val_evaluator=dict(type=OwnScore),
        custom_hooks=[seen, EarlyStoppingHook(monitor='score', rule='greater', patience=2)],
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', save_best='score', rule='greater', interval=-1)),
        train_cfg=dict(by_epoch=True, max_epochs=6, val_interval=1),
    )
    runner.train()
    scores = [metrics['score'] for metrics in seen.metrics]
    best = runner.message_hub.get_info('best_score')
    wanted = [-1.0, -2.0, -3.0]
    return [] if scores == wanted and best == -1.0 and runner.epoch == 3 else [f'{scores}, {best}, {runner.epoch}']


CASES = (on_one_rank, different_things, hooks_on_main, own_scores)


def run_cases(folder: str) -> Faults:
    # How long to wait before looking for the others changes nothing in what is found.
    with patch.object(meeting, 'PATIENCE_SECONDS', 0.1):
        return {f'{case.__name__} {stage}': case(stage, folder) for case in CASES for stage in STAGES}


@pytest.fixture(scope='module')
def found(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return merged(run_ranks(2, run_cases, str(tmp_path_factory.mktemp('saving'))))


@pytest.mark.parametrize('stage', STAGES)
@pytest.mark.parametrize('case', [case.__name__ for case in CASES])
def test_saving_together(found: Faults, case: str, stage: int) -> None:
    assert not found[f'{case} {stage}'], '\n'.join(found[f'{case} {stage}'])
