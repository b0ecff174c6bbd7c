"""Groups of an optimizer through frozen and unfrozen parameters, and through a resume at another stage and size."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import CosineAnnealingLR, OptimWrapper, build_optim_wrapper
from torch import nn

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from tests.distributed.cases import Faults, merged
from tests.distributed.ranks import run_ranks
from tests.distributed.training import full
from tests.models import ToyModel, toy_batch

pytestmark = pytest.mark.distributed

STAGES = (0, 1, 2, 3)
# A module, a weight and a 0-dim parameter of a unit.
FROZEN = ('frozen.weight', 'frozen.bias', 'blocks.0.up.weight', 'blocks.1.scale')


def fields(stage: int) -> dict:
    policy = dict(type='ModuleClassPolicy', classes=['Block'])
    return dict(stage=stage, find_unused_parameters=True, wrap_policy=policy)


def set_frozen(net: nn.Module, names: tuple[str, ...], frozen: bool) -> None:
    for name, param in net.named_parameters():
        if name in names:
            param.requires_grad_(not frozen)


def thawed(stage: int | None) -> dict[str, Any]:
    """Train with parameters that are frozen for two steps, and one from the fifth on; None: stock DDP.

    DDP averages what required gradients when it was built, so there they are frozen afterwards.
    """
    torch.manual_seed(0)
    net = ToyModel()
    set_frozen(net, FROZEN, stage is not None)
    if stage is None:
        model: Any = MMDistributedDataParallel(
            net, device_ids=None, broadcast_buffers=False, find_unused_parameters=True
        )
        set_frozen(net, FROZEN, True)
    else:
        model = ZeroModelWrapper(module=net, **fields(stage))
    # Some groups hold frozen parameters only, as paramwise_cfg makes them.
    optimizer = torch.optim.AdamW([dict(params=[param]) for param in net.parameters()], lr=1e-2)
    wrapper = (OptimWrapper if stage is None else ZeroOptimWrapper)(optimizer, clip_grad=dict(max_norm=0.5))
    wrapper.initialize_count_status(model, 0, 6)
    states = []
    for index in range(6):
        if index == 2:
            set_frozen(net, FROZEN, False)
        if index == 4:
            set_frozen(net, ('stem.weight',), True)
        model.train_step(toy_batch(2 * index + dist.get_rank()), wrapper)
        with_state = [name for name, param in net.named_parameters() if optimizer.state.get(param)]
        states.append(sorted(with_state))
    norms = list(wrapper.message_hub.get_scalar('train/grad_norm').data[0][-6:])
    weights = {name: full(param) for name, param in net.named_parameters()}
    return dict(states=states, norms=norms, weights=weights, groups=len(optimizer.param_groups))


def thawing(stages: tuple[int, ...]) -> Faults:
    wanted, found = thawed(None), {}
    assert set(FROZEN).isdisjoint(wanted['states'][1]) and set(FROZEN) <= set(wanted['states'][2])
    for stage in stages:
        ours = thawed(stage)
        faults = [what for what in ('states', 'groups') if ours[what] != wanted[what]]
        faults += [] if ours['norms'] == pytest.approx(wanted['norms'], rel=1e-6) else ['norms']
        for name, weight in wanted['weights'].items():
            off = float((ours['weights'][name] - weight).norm() / weight.norm())
            faults += [] if off <= 1e-5 else [f'{name} is {off:.0e} off']
        found[f'stage {stage}'] = faults
    return found


def test_what_a_hook_unfreezes_trains_as_under_ddp() -> None:
    """While frozen it has no gradient, no state and no part in the norm; its group stays in its place."""
    found = merged(run_ranks(2, thawing, STAGES))
    assert not any(found.values()), found


OPTIM = dict(
    optimizer=dict(type='AdamW', lr=1e-2, weight_decay=0.05),
    paramwise_cfg=dict(
        norm_decay_mult=0.0, bias_lr_mult=2.0, bypass_duplicate=True, custom_keys={'blocks.1': dict(lr_mult=0.1)}
    ),
)


def build(stage: int) -> tuple[ZeroModelWrapper, ZeroOptimWrapper, CosineAnnealingLR]:
    torch.manual_seed(0)
    model = ZeroModelWrapper(module=ToyModel(), **fields(stage))
    wrapper: Any = build_optim_wrapper(model, dict(type='ZeroOptimWrapper', **copy.deepcopy(OPTIM)))
    wrapper.initialize_count_status(model, 0, 100)
    for group in wrapper.optimizer.param_groups:
        # As constructors of layer-wise decay leave it.
        group['lr_scale'] = group['lr'] / 1e-2
    return model, wrapper, CosineAnnealingLR(wrapper, T_max=10, by_epoch=False)


def groups_of(wrapper: ZeroOptimWrapper) -> list[dict]:
    return [{**group, 'params': len(group['params'])} for group in wrapper.optimizer.param_groups]


def saved(folder: str, stage: int) -> list[dict]:
    model, wrapper, scheduler = build(stage)
    for index in range(3):
        model.train_step(toy_batch(index), wrapper)
        scheduler.step()
    # One group of its own.
    wrapper.optimizer.param_groups[1]['betas'] = (0.8, 0.9)
    state = dict(optim=wrapper.state_dict(), scheduler=scheduler.state_dict())
    if dist.get_rank() == 0:
        torch.save(state, f'{folder}/{stage}.pth')
    return groups_of(wrapper)


def resumed(folder: str, stage: int, wanted: list[dict]) -> list[str]:
    state = torch.load(f'{folder}/{stage}.pth', weights_only=True)
    faults = []
    for other in (0, 1, 3):
        model, wrapper, scheduler = build(other)
        wrapper.load_state_dict(state['optim'])
        scheduler.load_state_dict(state['scheduler'])
        faults += [] if groups_of(wrapper) == wanted else [f'stage {other}: the groups are others']
        before = [group['lr'] for group in wrapper.optimizer.param_groups]
        model.train_step(toy_batch(3), wrapper)
        scheduler.step()
        after = [group['lr'] / group['lr_scale'] for group in wrapper.optimizer.param_groups]
        goes_on = len({f'{lr:.6e}' for lr in after}) == 1 and after[0] < before[0] / wanted[0]['lr_scale']
        faults += [] if goes_on else [f'stage {other}: the schedule goes on otherwise']
    return faults


@pytest.mark.parametrize('stage', [0, 3])
def test_groups_through_a_resume(tmp_path: Any, stage: int) -> None:
    """Every key of every group, from 2 ranks to 1, and to every other stage."""
    wanted, _ = run_ranks(2, saved, str(tmp_path), stage)
    assert len({(group['lr'], group['weight_decay']) for group in wanted}) > 3
    found = run_ranks(1, resumed, str(tmp_path), stage, wanted)
    assert not any(found), found
