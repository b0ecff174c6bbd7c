"""The pair in a hand-written loop, on a group of one that it makes itself."""

import copy

import pytest
import torch
import torch.distributed as dist
from mmengine.logging import MessageHub
from mmengine.optim import OptimWrapper
from mmengine.registry import MODEL_WRAPPERS, OPTIM_WRAPPERS
from mmengine.runner import Runner
from torch import nn

from mmzero.errors import ConfigError
from tests.models import ToyModel, toy_batch

pytestmark = pytest.mark.usefixtures('group')

STAGES = (0, 1, 2, 3)
BLOCKS = dict(type='ModuleClassPolicy', classes=['Block'])
BFLOAT16 = dict(param_dtype='bfloat16')


def wrap(net=None, stage=3, **fields):
    """Wrap a model."""
    torch.manual_seed(0)
    # ToyModel has parameters that it does not use, on which DDP fails otherwise.
    defaults = dict(wrap_policy=BLOCKS, find_unused_parameters=stage == 0)
    cfg = dict(type='ZeroModelWrapper', module=net or ToyModel(), stage=stage)
    return MODEL_WRAPPERS.build(cfg | defaults | fields)


def optim_of(model, **fields):
    """Make the optimizer wrapper of a wrapped model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return OPTIM_WRAPPERS.build(dict(type='ZeroOptimWrapper', optimizer=optimizer, **fields))


def losses_of(model, optim, steps=4):
    """Train on one batch."""
    optim.initialize_count_status(model, 0, steps)
    return [float(model.train_step(toy_batch(0), optim)['loss']) for _ in range(steps)]


def whole(tensor):
    """A tensor, gathered where it is a shard."""
    return tensor.full_tensor() if hasattr(tensor, 'full_tensor') else tensor


@pytest.fixture
def hub(tmp_path):
    """A message hub of this test's own."""
    return MessageHub.get_instance(str(tmp_path))


@pytest.mark.parametrize('stage', STAGES)
def test_loop_equals_plain_training(stage):
    torch.manual_seed(0)
    net = ToyModel()
    plain, clip_grad = copy.deepcopy(net), dict(max_norm=0.5)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    expected = losses_of(plain, OptimWrapper(optimizer, clip_grad=clip_grad))
    model = wrap(net, stage)
    losses = losses_of(model, optim_of(model, clip_grad=clip_grad))
    assert losses == pytest.approx(expected, rel=1e-6)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize('stage', STAGES)
def test_module_is_the_model_with_its_names_and_buffers(stage):
    net = ToyModel()
    names = [name for name, _ in net.named_parameters()]
    keys, bases = list(net.state_dict()), type(net).__mro__
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    values = {name: param.detach().clone() for name, param in net.named_parameters()}
    model = wrap(net, stage)
    assert model.module is net
    assert [name for name, _ in model.module.named_parameters()] == names
    assert list(model.module.state_dict()) == list(model.state_dict()) == keys
    assert isinstance(net, bases[0])
    buffers = dict(net.named_buffers())
    assert buffers.keys() == before.keys() >= {'offset'}
    assert all(torch.equal(buffers[name], value) for name, value in before.items())
    for name, param in net.named_parameters():
        assert torch.equal(whole(param.detach()), values[name]), name
    assert net.tied.weight is net.head.weight


@pytest.mark.parametrize('stage', STAGES)
def test_predicts(stage):
    model = wrap(stage=stage).eval()
    data = toy_batch(0)
    with torch.no_grad():
        for step in (model.val_step, model.test_step):
            assert torch.equal(torch.stack(step(data)), model(**data))


@pytest.mark.parametrize('stage', STAGES)
def test_optimizer_that_was_built_before_is_refused(stage):
    net = ToyModel()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wrap(net, stage)
    message = 'no ZeroModelWrapper has sharded. Build the model wrapper first and the optimizer on'
    with pytest.raises(ValueError, match=message):
        OPTIM_WRAPPERS.build(dict(type='ZeroOptimWrapper', optimizer=optimizer))


def test_optimizer_of_a_model_without_wrapper_is_refused():
    optimizer = torch.optim.SGD(ToyModel().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="use runner_type='mmzero.ZeroRunner'"):
        OPTIM_WRAPPERS.build(dict(type='ZeroOptimWrapper', optimizer=optimizer))


def test_optimizer_of_two_models_is_refused():
    first, second = wrap(), wrap()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    with pytest.raises(ValueError, match='parameters of two models; give each its own'):
        OPTIM_WRAPPERS.build(dict(type='ZeroOptimWrapper', optimizer=optimizer))


@pytest.mark.parametrize('stage', STAGES)
@pytest.mark.parametrize('kind', ['norm', 'value'])
def test_clip_grad(stage, kind, hub):
    limit = 1e-3
    clip_grad = dict(max_norm=limit) if kind == 'norm' else dict(type='value', clip_value=limit)
    given = dict(clip_grad)
    model = wrap(stage=stage)
    optim = optim_of(model, clip_grad=clip_grad)
    optim.message_hub = hub
    seen = []
    # Clipping is over when the optimizer steps; zero_grad follows.
    optim.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(whole(p.grad).clone() for p in model.parameters() if p.grad is not None)
    )
    losses_of(model, optim, steps=1)
    assert clip_grad == given
    if kind == 'value':
        assert max(grad.abs().max() for grad in seen) == pytest.approx(limit)
        return
    assert float(torch.stack([grad.norm() for grad in seen]).norm()) == pytest.approx(limit, rel=1e-3)
    assert hub.get_scalar('train/grad_norm').current() > limit


def test_autocast_over_fp32_units_is_refused_at_stage_3():
    model = wrap(stage=3)
    with pytest.raises(ConfigError, match='precision.param_dtype: autocast to .* or use stage 2'):
        optim_of(model, dtype='bfloat16')


@pytest.mark.parametrize(('stage', 'precision'), [(0, {}), (1, {}), (2, {}), (3, BFLOAT16), (2, BFLOAT16)])
def test_autocast(stage, precision):
    model = wrap(stage=stage, precision=precision)
    seen = []
    model.module.head.register_forward_hook(lambda _, args, out: seen.append(out.dtype))
    losses = losses_of(model, optim_of(model, dtype='bfloat16'))
    assert set(seen) == {torch.bfloat16}
    assert losses[-1] < 0.9 * losses[0]
    assert {param.dtype for param in model.parameters()} == {torch.float32}


def test_dtype_that_is_not_supported():
    with pytest.raises(ConfigError, match='optim_wrapper.dtype: got .float16.; float16 is not supp'):
        optim_of(wrap(), dtype='float16')


def test_faults_come_together():
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
def test_model_can_be_wrapped_after_a_fault_was_mended(wrong):
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


def test_frozen_model_at_stage_0():
    net = nn.Sequential(nn.Linear(2, 2)).requires_grad_(False)
    assert wrap(net, 0, wrap_policy=None)(torch.ones(1, 2)).shape == (1, 2)
