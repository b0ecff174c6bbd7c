"""ZeroRunner's eight steps come in the design's order."""

from typing import Any

import pytest
import torch.distributed as dist
from mmengine.hooks import Hook
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

import mmzero.runner.zero_runner as zero_runner
import mmzero.wrappers.model as model_wrapper
from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero.engines import Engine
from mmzero.engines.fsdp2 import FSDP2Engine
from tests.runs import digits_config

ORDER = [
    'check',
    'env',
    'build',
    'weights',
    'patch',
    'plan',
    'shard',
    'reseed',
    'bind optimizer',
    'schedulers',
    'before_run hooks',
    'resume',
    'train_step',
]


class FirstHook(Hook):
    """Notes when hooks start to run."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def before_run(self, runner: Any) -> None:
        self.events.append('before_run hooks')


def test_order_of_the_steps(digits: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def note(owner: Any, name: str, event: str) -> None:
        original = getattr(owner, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            events.append(event)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)

    note(zero_runner, 'check_config', 'check')
    note(zero_runner, 'init_process_group', 'env')
    note(Runner, 'build_model', 'build')
    note(zero_runner, '_init_weights', 'weights')
    note(model_wrapper, 'apply_patches', 'patch')
    note(model_wrapper, 'plan_units', 'plan')
    note(FSDP2Engine, 'shard', 'shard')
    note(zero_runner, 'set_random_seed', 'reseed')
    note(Engine, 'bind', 'bind optimizer')
    note(Runner, 'build_param_scheduler', 'schedulers')
    note(Runner, 'load_or_resume', 'resume')
    note(ZeroModelWrapper, 'train_step', 'train_step')

    runner = RUNNERS.build(digits_config(digits, str(tmp_path), train_cfg__max_epochs=1))
    runner.register_hook(FirstHook(events))
    try:
        runner.train()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()

    first = [event for index, event in enumerate(events) if event not in events[:index]]
    assert first == ORDER
    # Each once; MMEngine calls back for what is there already.
    assert all(events.count(event) == 1 for event in ORDER[:9])
    assert isinstance(runner.model, ZeroModelWrapper)
    assert isinstance(runner.optim_wrapper, ZeroOptimWrapper)
