"""What the pair refuses, and that it says what to write instead."""

import re

import pytest
import torch
import torch.distributed as dist
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from mmengine.runner import Runner

from mmzero import ZeroOptimWrapper
from mmzero.errors import ConfigError
from tests.models import ToyModel, toy_batch

STAGES = (0, 1, 2, 3)


@pytest.mark.parametrize('stage', STAGES)
def test_optimizer_that_was_built_before_is_refused(wrap, stage):
    net = ToyModel()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wrap(net, stage)
    message = 'no ZeroModelWrapper has sharded. Build the model wrapper first and the optimizer on'
    with pytest.raises(ConfigError, match=message):
        OPTIM_WRAPPERS.build(dict(type='ZeroOptimWrapper', optimizer=optimizer))


def test_optimizer_of_a_model_without_wrapper_is_refused():
    optimizer = torch.optim.SGD(ToyModel().parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="use runner_type='mmzero.ZeroRunner'"):
        OPTIM_WRAPPERS.build(dict(type='ZeroOptimWrapper', optimizer=optimizer))


def test_optimizer_of_two_models_is_refused(wrap):
    first, second = wrap(), wrap()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    with pytest.raises(ConfigError, match='parameters of two models; give each its own'):
        OPTIM_WRAPPERS.build(dict(type='ZeroOptimWrapper', optimizer=optimizer))


@pytest.mark.parametrize('stage', STAGES)
def test_one_foreign_parameter_is_refused(wrap, stage):
    model = wrap(stage=stage)
    optimizer = torch.optim.SGD([*model.parameters(), torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(ConfigError, match='optim_wrapper.optimizer: holds parameters that no ZeroModelWrapper'):
        OPTIM_WRAPPERS.build(dict(type='ZeroOptimWrapper', optimizer=optimizer))


@pytest.mark.parametrize('stage', STAGES)
@pytest.mark.parametrize('kind', [OptimWrapper, ZeroOptimWrapper])
def test_training_with_a_wrapper_that_is_not_of_this_model_is_refused(wrap, stage, kind):
    """MMEngine's own on the right parameters, which would step unfinished gradients, and ours of another model."""
    model = wrap(stage=stage)
    parameters = model.parameters() if kind is OptimWrapper else wrap(stage=stage).parameters()
    optim = kind(torch.optim.SGD(parameters, lr=0.1))
    before = model.module.stem.bias.detach().clone()
    with pytest.raises(ConfigError, match=f'optim_wrapper: a {kind.__name__} that was not built on this model'):
        model.train_step(toy_batch(0), optim)
    assert torch.equal(model.module.stem.bias.detach(), before)


def test_autocast_over_fp32_units_is_refused_at_stage_3(wrap, optim_of):
    model = wrap(stage=3)
    with pytest.raises(ConfigError, match='precision.param_dtype: autocast to .* or use stage 2'):
        optim_of(model, dtype='bfloat16')


def test_dtype_that_is_not_supported(wrap, optim_of):
    with pytest.raises(ConfigError, match='optim_wrapper.dtype: got .float6.; expected None or'):
        optim_of(wrap(), dtype='float6')


@pytest.mark.parametrize(
    'dtype, scale, wanted',
    [
        (None, 512.0, 'loss_scale: got 512.0 for float32, which needs none; remove it'),
        ('bfloat16', 'dynamic', "loss_scale: got 'dynamic' for torch.bfloat16, which needs none"),
        ('float16', 'dynamik', "loss_scale: got 'dynamik'; allowed: 'dynamic', a number above 0, or a dict"),
        ('float16', 0, 'loss_scale: got 0; allowed'),
        ('float16', True, 'loss_scale: got True; allowed'),
        ('float16', dict(init_scal=1.0), "'init_scal' is unknown; did you mean 'init_scale'?"),
        ('float16', dict(growth_factor=1.0), 'growth_factor=1.0; expected a number above 1'),
        ('float16', dict(backoff_factor=1.5), 'backoff_factor=1.5; expected a number between 0 and 1'),
        ('float16', dict(growth_interval=2.5), 'growth_interval=2.5; expected an integer of 1 or more'),
        ('float16', dict(init_scale='big'), "init_scale='big'; expected a number above 0"),
    ],
)
def test_scale_that_does_not_fit(wrap, optim_of, dtype, scale, wanted):
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        optim_of(wrap(stage=2), dtype=dtype, loss_scale=scale)


def test_faults_come_together(wrap):
    with pytest.raises(ConfigError) as caught:
        wrap(stage=4, mesh=dict(shard=2), wrap_polic='x')
    assert len(caught.value.faults) == 3


@pytest.mark.parametrize(
    'wrong',
    [
        dict(activation_checkpointing=['blocks.0', 'Nope']),
        dict(wrap_policy=dict(type='ModuleClassPolicy', classes=['Nope'])),
        dict(wrap_policy='Nope'),
    ],
)
def test_model_can_be_wrapped_after_a_fault_was_mended(wrap, optim_of, losses_of, wrong):
    net = ToyModel()
    right = dict(activation_checkpointing=['blocks.0', 'stem'])
    with pytest.raises(ValueError, match='Nope'):
        wrap(net, **(right | wrong))
    model = wrap(net, **right)
    losses = losses_of(model, optim_of(model))
    assert losses[-1] < losses[0]


def run_plainly(tmp_path):
    """Give the pair to MMEngine's own Runner."""
    runner = Runner(
        model=ToyModel(),
        work_dir=str(tmp_path),
        train_dataloader=dict(dataset=list(range(4)), sampler=dict(type='DefaultSampler'), batch_size=1, num_workers=0),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        optim_wrapper=dict(type='ZeroOptimWrapper', optimizer=dict(type='SGD', lr=0.1)),
        experiment_name=f'plain of {tmp_path}',
        cfg=dict(model_wrapper_cfg=dict(type='ZeroModelWrapper')),
    )
    runner.train()


def test_plain_runner_on_one_process_is_refused(tmp_path):
    with pytest.raises(ValueError, match="use runner_type='mmzero.ZeroRunner'"):
        run_plainly(tmp_path)


def test_plain_runner_on_many_is_refused_when_it_wraps(tmp_path, monkeypatch):
    monkeypatch.setattr(Runner, 'distributed', property(lambda self: True))
    monkeypatch.setattr('mmengine.runner.runner.init_dist', lambda *args, **kwargs: None)
    with pytest.raises(ConfigError, match="runner_type: Runner .* add runner_type = 'mmzero.ZeroRunner'"):
        run_plainly(tmp_path)
    assert not dist.is_initialized()


class OwnClipping(ZeroOptimWrapper):
    """Overrides what the engine does."""

    def _clip_grad(self) -> None:
        """Never called."""


def test_an_override_that_would_never_be_called(wrap):
    model = wrap(stage=3)
    with pytest.raises(ConfigError, match='OwnClipping overrides _clip_grad, which is never called'):
        OwnClipping(torch.optim.SGD(model.parameters(), lr=0.1))
