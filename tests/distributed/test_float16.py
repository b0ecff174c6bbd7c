"""float16 with a scaled loss, on models that bite: as stock DDP under autocast with torch's GradScaler."""

import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mmzero import ZeroModelWrapper, ZeroOptimWrapper, _compat
from mmzero.errors import ConfigError
from tests.distributed import test_methods
from tests.distributed.cases import Faults, differing, merged, refused
from tests.distributed.parity import adamw, sgd
from tests.distributed.ranks import run_ranks
from tests.distributed.test_odd_parameters import CLIPS, Branched, Mixed, Tiny
from tests.distributed.test_parity import Branching
from tests.distributed.training import compare, full, train
from tests.models import TinyViT, ToyModel, image_batch, toy_batch

pytestmark = pytest.mark.distributed

# Of each other: both round to float16, and some parameters to bfloat16, in another order.
BOUNDS = dict(loss=2e-3, norm=4e-3, grad=6e-3, update=1.5e-2, tensor=8e-2)
SCALE = dict(init_scale=2.0**10, growth_interval=2)


def units(*classes: str) -> dict:
    return dict(type='ModuleClassPolicy', classes=list(classes))


def pair(
    model: nn.Module, stage: int = 3, unused: bool = False, **optim: Any
) -> tuple[ZeroModelWrapper, ZeroOptimWrapper]:
    precision = dict(param_dtype='float16') if stage else {}
    policy = {TinyViT: units('Layer'), ToyModel: units('Block')}.get(type(model))
    fields = dict(precision=precision, wrap_policy=policy, find_unused_parameters=unused)
    wrapper = ZeroModelWrapper(module=model, stage=stage, **fields)
    wrapped = ZeroOptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.1), dtype='float16', **optim)
    wrapped.initialize_count_status(wrapper, 0, 100)
    return wrapper, wrapped


def like_ddp(build: Callable, policy: Any, optimizer: Callable = sgd, **optim: Any) -> list[str]:
    """Compare at several stages; scale and skipped steps included, since a skipped one shows in the weights."""
    optim = dict(clip_grad=CLIPS[0], accumulative_counts=2, dtype='float16', loss_scale=SCALE, **optim)
    reference = train(build, toy_batch, optimizer, {}, optim, 6)
    faults = []
    for stage in (0, 1, 3):
        fields = dict(stage=stage, wrap_policy=policy, find_unused_parameters=True)
        if stage:
            fields['precision'] = dict(param_dtype='float16')
        found = train(build, toy_batch, optimizer, fields, optim, 6)
        distances = compare(found, reference).items()
        faults += [f'stage {stage}: {what} {value:.1e}' for what, value in distances if not value <= BOUNDS[what]]
    return faults


class Every2nd(ToyModel):
    """Its blocks have a layer that the last of two micro-batches alone uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in range(3))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.count = nn.Linear(12, 12), nn.Linear(12, 12), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        x = x + torch.tanh(self.always(x))
        return x if self.count % 2 else x + torch.tanh(self.sometimes(x))


def older_torch() -> list[str]:
    """Gradients of zeros by mmzero's own means."""
    with patch.object(_compat.fsdp2, 'HAS_REDUCE_SCATTER_UNUSED_PARAMS', False):
        return like_ddp(Branched, units('Branch'))


def hazards() -> Faults:
    return {
        'used in a micro-batch': like_ddp(Every2nd, units('Counting')),
        'unused, older torch': older_torch(),
        'used on one rank': like_ddp(Branching, units('Block')),
        'unused in a unit': like_ddp(Branched, units('Branch')),
        'methods': like_ddp(lambda: test_methods.Entered(('after', 'plain', 'forward')), test_methods.policy),
        'tiny and 0-dim': like_ddp(functools.partial(Tiny, True), units('Small')),
        'several dtypes': like_ddp(functools.partial(Mixed, 'one module'), units('Odd')),
        'frozen': like_ddp(functools.partial(Mixed, 'frozen'), units('Odd')),
        'tied': like_ddp(ToyModel, units('Block'), adamw),
    }


def spoil(model: nn.Module, name: str) -> Any:
    """Let one feature of what flows back into a module, or a parameter's own gradient, overflow on one rank."""
    factor = float('inf') if dist.get_rank() == 1 else 1.0
    param = dict(model.named_parameters()).get(name)
    if param is not None:
        return param.register_hook(lambda grad: grad * factor)

    def hook(_: nn.Module, grads: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        factors = torch.ones_like(grads[0][0])
        factors[..., 0] = factor
        return tuple(grad * factors for grad in grads)

    return model.get_submodule(name).register_full_backward_pre_hook(hook)


def overflow(stage: int) -> list[str]:
    """A gradient of one rank overflows: every rank skips.

    All of them, one row of a shard, which one rank alone holds, or a 0-dim parameter.
    """
    faults = []
    batch = toy_batch(dist.get_rank())
    for name in ('blocks.1', 'stem', 'blocks.1.scale'):
        torch.manual_seed(0)
        model, optim = pair(ToyModel(), stage, True, loss_scale=SCALE, clip_grad=dict(max_norm=1.0))
        before = {key: full(param) for key, param in model.module.named_parameters()}
        handle = spoil(model.module, name)
        model.train_step(batch, optim)
        handle.remove()
        after = {key: full(param) for key, param in model.module.named_parameters()}
        faults += [f'{name}: {fault}' for fault in differing(after, before)]
        scale = optim.engine.scaler_state()['scale']
        faults += [] if scale == SCALE['init_scale'] / 2 else [f'{name}: scale {scale}']
        model.train_step(batch, optim)
        moved = differing({key: full(param) for key, param in model.module.named_parameters()}, before)
        faults += [] if moved else [f'{name}: the next step is skipped, too']
    return faults


def scales() -> list[str]:
    """A dynamic scale grows, a fixed one stays; both through an overflow."""
    faults = []
    for given, wanted in ((SCALE, [2**10, 2**11, 2**11, 2**12]), (64.0, [64] * 4)):
        model, optim = pair(TinyViT(), loss_scale=given)
        found = []
        for step in range(4):
            model.train_step(image_batch(step), optim)
            found.append(optim.engine.scaler_state()['scale'])
        faults += [] if found == wanted else [f'{given}: {found}']
    model, optim = pair(TinyViT(), loss_scale=2.0**40)
    before = {key: full(param) for key, param in model.module.named_parameters()}
    model.train_step(image_batch(0), optim)
    faults += differing({key: full(param) for key, param in model.module.named_parameters()}, before)
    return faults + ([] if optim.engine.scaler_state()['scale'] == 2.0**40 else ['a fixed scale moved'])


def fused() -> list[str]:
    """A first step that is skipped leaves a fused optimizer as it was."""
    model, _ = pair(TinyViT(), loss_scale=2.0**40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    optim = ZeroOptimWrapper(optimizer, dtype='float16', loss_scale=dict(init_scale=2.0**40))
    optim.initialize_count_status(model, 0, 100)
    model.train_step(image_batch(0), optim)
    return ['it has state'] if optimizer.state else []


def resumed() -> list[str]:
    """The scale and its count of good steps go on, on ranks that were given nothing as well; a fixed one is new."""
    model, optim = pair(TinyViT(), loss_scale=dict(init_scale=2.0**10, growth_interval=3))
    for step in range(5):
        model.train_step(image_batch(step), optim)
    wanted, state = optim.engine.scaler_state(), optim.state_dict()
    faults = [] if bool(state) == (dist.get_rank() == 0) else ['state on another rank']
    for scale, expected in (('dynamic', wanted['scale']), (64.0, 64.0)):
        _, again = pair(TinyViT(), loss_scale=scale)
        again.load_state_dict(state)
        found = again.engine.scaler_state()
        if found['scale'] != expected or (scale == 'dynamic' and found != wanted):
            faults.append(f'{scale}: {found} instead of {wanted}')
    _, exact = pair(TinyViT(), stage=0)
    exact.load_state_dict({key: value for key, value in state.items() if key != 'loss_scaler'})
    return faults + ([] if exact.engine.scaler_state()['scale'] == 2.0**16 else ['no scaler saved, and none new'])


def nothing_used() -> list[str]:
    """A step without any gradient is none, and no error."""
    model, optim = pair(Tiny(False), loss_scale=SCALE)
    loss = torch.zeros((), requires_grad=True)
    optim.update_params(loss * 1.0)
    return [] if optim.engine.scaler_state()['scale'] == SCALE['init_scale'] else ['the scale moved']


def stored_in_half() -> list[str]:
    faults: list[str] = []
    with refused(faults, ConfigError, 'parameters are stored in float16', 'keep the model in float32'):
        pair(TinyViT().half())
    return faults


def run_cases() -> Faults:
    return {
        **hazards(),
        **{f'overflow, stage {stage}': overflow(stage) for stage in (0, 1, 3)},
        'scales': scales(),
        'fused': fused(),
        'resumed': resumed(),
        'nothing used': nothing_used(),
        'stored in half': stored_in_half(),
    }


@pytest.mark.parametrize('ranks', [2, pytest.param(4, marks=pytest.mark.slow)])
def test_float16(ranks: int) -> None:
    for case, faults in merged(run_ranks(ranks, run_cases)).items():
        assert not faults, f'{case}: {faults}'
