"""Errors of others are traced to the part of the config that caused them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.hooks import Hook
from mmengine.registry import HOOKS, METRICS
from mmengine.runner import Runner

from mmzero.errors import ConfigError
from mmzero.runner.blame import blaming, describe_error
from tests.models import ToyModel
from tests.vectors import Count, Vectors, loader, vector_runner

pytestmark = pytest.mark.usefixtures('group')


@HOOKS.register_module(force=True)
class FailingHook(Hook):
    """Fails when it is used."""

    def after_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        raise AssertionError


@METRICS.register_module(force=True)
class FailingMetric(Count):
    """Fails when its results are put together."""

    def compute_metrics(self, results: list) -> dict:
        raise KeyError('nothing')


class FailingModel(ToyModel):
    """Fails in its forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return torch.ones(2, 3) @ torch.ones(2, 3)


class FailingVectors(Vectors):
    """Fails when a sample is asked for."""

    def __getitem__(self, index: int) -> dict:
        raise IndexError('no such vector')


@pytest.mark.parametrize(
    ('changes', 'wanted'),
    [
        (dict(custom_hooks=[dict(type='FailingHook')]), r'custom_hooks\[0\]: AssertionError: raise AssertionError'),
        (dict(val_evaluator=[dict(type='FailingMetric')]), r"val_evaluator\[0\]: KeyError: 'nothing'"),
        (dict(model=dict(type=FailingModel)), 'model: RuntimeError: mat1 and mat2 shapes cannot be multiplied'),
        (dict(train_dataloader=loader(FailingVectors())), 'train_dataloader: IndexError: no such vector'),
        (dict(val_dataloader=loader(FailingVectors())), 'val_dataloader: IndexError: no such vector'),
    ],
)
def test_what_fails_in_a_run_is_named(tmp_path: Any, changes: dict, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted) as caught:
        vector_runner(tmp_path, **changes).train()
    # Nothing is lost: the log file has the traceback.
    log = str(caught.value).split('its traceback is in ')[1]
    with open(log) as file:
        assert 'Traceback (most recent call last)' in file.read()


@HOOKS.register_module(force=True)
class LaterFailingHook(Hook):
    """A mistake of the user's own code, which comes out late."""

    def after_train_iter(self, runner: Any, batch_idx: int, *args: Any, **kwargs: Any) -> None:
        if batch_idx:
            raise KeyError('a mistake in a hook')


def test_what_fails_after_it_has_worked_keeps_its_traceback(tmp_path: Any) -> None:
    """Then it is the code or the data, not the config."""
    with pytest.raises(KeyError, match='a mistake in a hook'):
        vector_runner(tmp_path, custom_hooks=[dict(type='LaterFailingHook')]).train()


def test_the_place_of_a_failure_is_named(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r'\(runner/test_blame\.py:\d+\); its traceback is in'):
        vector_runner(tmp_path, model=dict(type=FailingModel)).train()


@HOOKS.register_module(force=True)
class BrokenHook(Hook):
    """A mistake in a constructor."""

    def __init__(self) -> None:
        raise ZeroDivisionError


def test_the_traceback_is_kept_where_there_is_no_log_file_yet(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r'custom_hooks\[0\]: ZeroDivisionError.*traceback_rank0\.txt'):
        vector_runner(tmp_path, custom_hooks=[dict(type='BrokenHook')])
    assert 'ZeroDivisionError' in (tmp_path / 'traceback_rank0.txt').read_text()


def failing(error: Exception) -> Any:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize('error', [torch.OutOfMemoryError('full'), MemoryError()])
def test_a_full_memory_is_no_fault_of_the_config(error: Exception) -> None:
    with pytest.raises(type(error)), blaming({}):
        failing(error)()


def test_what_mmzero_does_wrong_keeps_its_traceback(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = vector_runner(tmp_path)
    monkeypatch.setattr(type(runner), 'prepare', failing(ZeroDivisionError('ours')))
    with pytest.raises(ZeroDivisionError, match='ours'):
        runner.train()


def test_a_broken_connection_is_no_fault_of_the_config(tmp_path: Any) -> None:
    class Broken(ToyModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            dist.all_gather([torch.ones(2)], torch.ones(3))

    with pytest.raises(RuntimeError):
        vector_runner(tmp_path, dict(type=Broken)).train()


def test_an_assertion_without_a_text_says_its_line() -> None:
    try:
        assert Runner is None
    except AssertionError as error:
        assert 'AssertionError: assert' in describe_error(error)


def test_unused_parameters_at_stage_0(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match='find_unused_parameters: got False.*set it to True'):
        vector_runner(tmp_path, stage=0).train()
