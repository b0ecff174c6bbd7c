"""The pair in a hand-written loop, on a group of one that it makes itself."""

import copy

import pytest
import torch
from mmengine.logging import MessageHub
from mmengine.optim import OptimWrapper
from torch import nn

from tests.models import ToyModel, toy_batch

STAGES = (0, 1, 2, 3)
BFLOAT16 = dict(param_dtype='bfloat16')


def whole(tensor):
    """A tensor, gathered where it is a shard."""
    return tensor.full_tensor() if hasattr(tensor, 'full_tensor') else tensor


@pytest.fixture
def hub(tmp_path):
    """A message hub of this test's own."""
    return MessageHub.get_instance(str(tmp_path))


@pytest.mark.parametrize('stage', STAGES)
def test_loop_equals_plain_training(wrap, optim_of, losses_of, stage):
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
def test_module_is_the_model_with_its_names_and_buffers(wrap, stage):
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
def test_predicts(wrap, stage):
    model = wrap(stage=stage).eval()
    data = toy_batch(0)
    with torch.no_grad():
        for step in (model.val_step, model.test_step):
            assert torch.equal(torch.stack(step(data)), model(**data))


@pytest.mark.parametrize('stage', STAGES)
@pytest.mark.parametrize('kind', ['norm', 'value'])
def test_clip_grad(wrap, optim_of, losses_of, stage, kind, hub):
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


@pytest.mark.parametrize(('stage', 'precision'), [(0, {}), (1, {}), (2, {}), (3, BFLOAT16), (2, BFLOAT16)])
def test_autocast(wrap, optim_of, losses_of, stage, precision):
    model = wrap(stage=stage, precision=precision)
    seen = []
    model.module.head.register_forward_hook(lambda _, args, out: seen.append(out.dtype))
    losses = losses_of(model, optim_of(model, dtype='bfloat16'))
    assert set(seen) == {torch.bfloat16}
    assert losses[-1] < 0.9 * losses[0]
    assert {param.dtype for param in model.parameters()} == {torch.float32}


def test_frozen_model_at_stage_0(wrap):
    net = nn.Sequential(nn.Linear(2, 2)).requires_grad_(False)
    assert wrap(net, 0, wrap_policy=None)(torch.ones(1, 2)).shape == (1, 2)
