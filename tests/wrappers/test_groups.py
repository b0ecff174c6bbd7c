"""Optimizer constructors make of a sharded model the groups that they make of the model itself."""

import copy
from typing import Any

import pytest
import torch
from mmengine.model import BaseModel
from mmengine.optim import build_optim_wrapper
from torch import nn

from mmzero.runner import ZeroRunner
from tests.models import Block, ToyModel
from tests.vectors import vector_runner

STAGES = (0, 1, 2, 3)


class ConvNeXt(nn.Module):
    """Its class and names, by which layer-wise decay goes."""

    def __init__(self) -> None:
        super().__init__()
        self.downsample_layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12)) for _ in range(4))
        self.stages = nn.ModuleList(nn.Sequential(*(Block(12, True) for _ in range(n))) for n in (3, 3, 9, 3))
        self.norm3 = nn.BatchNorm1d(12)


class Layered(BaseModel):
    """A model for layer-wise decay, with a head that decays not, a frozen part and a depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = ConvNeXt()
        self.neck = nn.Conv2d(4, 4, 3, groups=4)
        self.head = nn.Linear(12, 3)
        self.tied = nn.Linear(12, 3)
        self.tied.weight = self.head.weight
        self.backbone.downsample_layers[0].requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, inputs: torch.Tensor, mode: str = 'tensor') -> torch.Tensor:
        return inputs


SGD = dict(type='SGD', lr=0.1, weight_decay=0.05, momentum=0.9)
CONFIGS: dict[str, dict] = {
    'plain': {},
    'multipliers': dict(
        paramwise_cfg=dict(
            bypass_duplicate=True,
            norm_decay_mult=0.0,
            bias_lr_mult=2.0,
            bias_decay_mult=0.5,
            flat_decay_mult=0.1,
            dwconv_decay_mult=0.2,
        )
    ),
    'custom keys': dict(
        paramwise_cfg=dict(
            bypass_duplicate=True,
            custom_keys={'backbone': dict(lr_mult=0.1), 'backbone.stages.2': dict(lr_mult=0.2, decay_mult=0.0)},
        )
    ),
    **{
        decay: dict(
            constructor='mmdet.LearningRateDecayOptimizerConstructor',
            paramwise_cfg=dict(decay_rate=0.7, decay_type=decay, num_layers=6),
        )
        for decay in ('layer_wise', 'stage_wise')
    },
}


def groups_of(net: nn.Module, optim: Any) -> list[dict]:
    """Every option of every group, with its parameters by name, in their order."""
    names = {id(param): name for name, param in net.named_parameters()}
    return [
        {**group, 'params': [names[id(param)] for param in group['params']]} for group in optim.optimizer.param_groups
    ]


@pytest.mark.parametrize('stage', STAGES)
@pytest.mark.parametrize('name', CONFIGS)
def test_groups_are_those_without_sharding(wrap, name: str, stage: int) -> None:
    import mmdet.engine  # noqa: F401

    net = Layered()
    cfg = dict(optimizer=dict(SGD), **CONFIGS[name])
    expected = groups_of(net, build_optim_wrapper(net, copy.deepcopy(dict(cfg, type='OptimWrapper'))))
    # FSDP2 renames the classes of units.
    policy = dict(type='ModuleClassPolicy', classes=['Block', 'ConvNeXt', 'LayerNorm', 'Conv2d'])
    model = wrap(copy.deepcopy(net), stage, wrap_policy=policy)
    found = groups_of(model.module, build_optim_wrapper(model, copy.deepcopy(dict(cfg, type='ZeroOptimWrapper'))))
    assert found == expected
    settings = {(group['lr'], group['weight_decay']) for group in found}
    assert len(settings) >= {'plain': 1, 'multipliers': 3, 'custom keys': 3, 'layer_wise': 8, 'stage_wise': 6}[name]


@pytest.mark.parametrize('stage', STAGES)
def test_groups_through_the_runner(group: None, tmp_path: Any, stage: int) -> None:
    """Also with schedulers, which keep the ratios, and after a resume."""
    net = ToyModel()
    optim = dict(type='OptimWrapper', optimizer=dict(SGD), paramwise_cfg=CONFIGS['multipliers']['paramwise_cfg'])
    expected = groups_of(net, build_optim_wrapper(net, copy.deepcopy(optim)))

    def run(**changes: Any) -> ZeroRunner:
        wrapper = dict(find_unused_parameters=True)
        runner = vector_runner(tmp_path, ToyModel(), stage, wrapper, optim_wrapper=copy.deepcopy(optim), **changes)
        runner.train()
        return runner

    scheduler = dict(type='MultiStepLR', milestones=[1], gamma=0.25, by_epoch=False)
    first = run(param_scheduler=[scheduler])
    second = run(resume=True, param_scheduler=[scheduler], train_cfg=dict(by_epoch=True, max_epochs=2, val_interval=1))
    for runner in (first, second):
        # Validation left units gathered.
        runner.model.state_dict()
        found = groups_of(runner.model.module, runner.optim_wrapper)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours['params'] == theirs['params']
            assert ours['weight_decay'] == theirs['weight_decay']
            assert ours['initial_lr'] == theirs['lr']
            assert ours['lr'] == pytest.approx(0.25 * theirs['lr'])
