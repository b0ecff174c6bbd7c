"""The order of MMEngine's own Runner, and what each part of it does to shards: why ZeroRunner has another.

docs/the_road.md cites this file. If one of these tests fails, MMEngine or torch has changed, and a reason may be gone.
"""

import itertools
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.dist import broadcast, init_dist
from mmengine.hooks import Hook
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.runner import Runner, runner
from mmengine.runner.activation_checkpointing import turn_on_activation_checkpointing
from mmengine.runner.checkpoint import _load_checkpoint_to_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mmzero._compat import build_with_meta_parameters
from mmzero.engines import init_process_group
from tests.distributed.ranks import run_ranks
from tests.models import ToyModel, toy_batch
from tests.vectors import Count, loader

MMENGINE_ORDER = [
    'setup_env',
    'set_randomness',
    'build_model',
    'wrap_model',
    'register_hooks',
    'build_train_loop',
    'build_optim_wrapper',
    'scale_lr',
    'build_param_scheduler',
    'build_val_loop',
    'before_run hooks',
    '_init_model_weights',
    'turn_on_activation_checkpointing',
    'turn_on_efficient_conv_bn_eval',
    'load_or_resume',
    'initialize_count_status',
    '_maybe_compile',
    'before_train hooks',
    'train_step',
]

ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason='needs a machine without a GPU')
numbers = itertools.count()


def plain_runner(work_dir: Path, **changes: Any) -> Runner:
    """MMEngine's own Runner on vectors."""
    settings: dict[str, Any] = dict(
        train_dataloader=loader(),
        val_dataloader=loader(),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        val_cfg=dict(),
        val_evaluator=dict(type=Count),
        optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.01)),
        param_scheduler=dict(type='ConstantLR'),
        experiment_name=f'plain {next(numbers)}',
        log_level='ERROR',
        cfg=dict(activation_checkpointing=[], efficient_conv_bn_eval=[], compile=False),
    )
    return Runner(model=changes.pop('model', None) or ToyModel(), work_dir=str(work_dir), **{**settings, **changes})


def test_mmengines_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def note(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)

    for name in MMENGINE_ORDER:
        owners = (Runner, runner, OptimWrapper, ToyModel)
        owner = next((owner for owner in owners if hasattr(owner, name)), None)
        if owner is not None:
            note(owner, name)

    class Notes(Hook):
        def before_run(self, runner: Any) -> None:
            events.append('before_run hooks')

        def before_train(self, runner: Any) -> None:
            events.append('before_train hooks')

    plain_runner(tmp_path, custom_hooks=[Notes()]).train()
    assert list(dict.fromkeys(events)) == MMENGINE_ORDER


def shard(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh('cpu', (dist.get_world_size(),)))


@pytest.fixture
def sharded(group: None) -> nn.Module:
    init_process_group('none')
    return shard(ToyModel(scalar=False))


def test_a_plain_file_loads_nothing_into_shards(sharded: nn.Module, capfd: pytest.CaptureFixture) -> None:
    before = {name: param.full_tensor() for name, param in sharded.named_parameters()}
    file = OrderedDict((name, value + 1) for name, value in ToyModel(scalar=False).state_dict().items())
    _load_checkpoint_to_model(sharded, dict(state_dict=file), revise_keys=[])
    assert all(torch.equal(param.full_tensor(), before[name]) for name, param in sharded.named_parameters())
    assert 'got mixed torch.Tensor and DTensor' in ''.join(capfd.readouterr())


def test_an_optimizer_that_was_built_before_sharding_moves_nothing(group: None) -> None:
    init_process_group('none')
    model = ToyModel(scalar=False)
    optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    shard(model)
    losses = [model.train_step(toy_batch(0), optim)['loss'].item() for _ in range(3)]
    assert losses[0] == losses[1] == losses[2]


def test_a_model_on_meta_cannot_be_moved_to_the_device(tmp_path: Path) -> None:
    model = build_with_meta_parameters(ToyModel)
    with pytest.raises(NotImplementedError, match='Cannot copy out of meta tensor; no data!'):
        plain_runner(tmp_path, model=model)


class Keyword(nn.Module):
    """Takes keyword arguments, as mmdet's encoder layers do."""

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        return query


def test_mmengines_checkpointing_passes_no_keyword_arguments() -> None:
    model = nn.Sequential(Keyword())
    turn_on_activation_checkpointing(model, ['0'])
    with pytest.raises(TypeError, match="unexpected keyword argument 'query'"):
        model[0](query=torch.ones(1, requires_grad=True))


@ON_CPU
def test_mmengines_launcher_and_amp_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, MASTER_ADDR='127.0.0.1', MASTER_PORT=1).items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises((AttributeError, RuntimeError, AssertionError), match='(?i)cuda'):
        init_dist('pytorch', backend='gloo')
    assert not dist.is_initialized()
    with pytest.raises(AssertionError, match='only available training on gpu'):
        AmpOptimWrapper(optimizer=torch.optim.SGD(ToyModel().parameters(), lr=0.1))


def broadcast_and_save() -> tuple[str, dict]:
    """What Runner does after init_weights, and what it would save on this rank."""
    model = shard(ToyModel(scalar=False))
    try:
        for value in model.state_dict().values():
            broadcast(value)
        error = ''
    except NotImplementedError as caught:
        error = str(caught)
    saved = runner.weights_to_cpu(model.state_dict())
    shards = {name: value for name, value in saved.items() if isinstance(value, DTensor)}
    return error, {name: (tuple(value.shape), tuple(value.to_local().shape)) for name, value in shards.items()}


@pytest.mark.distributed
def test_runner_cannot_broadcast_shards_and_saves_one_ranks_part() -> None:
    for error, saved in run_ranks(2, broadcast_and_save):
        assert 'does not have a sharding strategy registered' in error
        assert saved['stem.weight'] == ((12, 12), (6, 12))
