"""Optimizers of other packages, where these are installed, and mmpretrain's layer-wise decay."""

import copy
import importlib
import importlib.util
from typing import Any

import pytest
import torch
from mmengine.model import BaseModel
from mmengine.optim import build_optim_wrapper
from torch import nn, optim

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero.errors import ConfigError
from tests.distributed.parity import BOUNDS
from tests.distributed.ranks import run_ranks
from tests.distributed.test_optimizers import HELD, ONE_BY_ONE, SHARDS, fields, of
from tests.distributed.training import compare, train
from tests.models import ToyModel, toy_batch
from tests.patches.zoo.packages import models_of

pytestmark = [pytest.mark.distributed, pytest.mark.zoo]

REFUSED = 'refused'
# Package, class, settings, and how it is shown parameters. mmpretrain's Lamb fails on 0-dim ones by itself.
CASES: list[tuple[str, str, dict, str]] = [
    ('bitsandbytes.optim', 'AdamW', dict(lr=1e-2), HELD),
    ('bitsandbytes.optim', 'AdamW8bit', dict(lr=1e-2, min_8bit_size=64), ONE_BY_ONE),
    ('lion_pytorch', 'Lion', dict(lr=1e-3), HELD),
    ('mmpretrain.engine.optimizers', 'Lamb', dict(lr=1e-2, weight_decay=0.01), SHARDS),
    ('prodigyopt', 'Prodigy', dict(), REFUSED),
    ('schedulefree', 'AdamWScheduleFree', dict(lr=1e-2), HELD),
    ('timm.optim', 'AdaBelief', dict(lr=1e-2), HELD),
    ('timm.optim', 'Adafactor', dict(lr=1e-2), ONE_BY_ONE),
    ('timm.optim', 'Adahessian', dict(lr=1e-2), REFUSED),
    ('timm.optim', 'AdamP', dict(lr=1e-2), ONE_BY_ONE),
    ('timm.optim', 'Adan', dict(lr=1e-2), HELD),
    ('timm.optim', 'Lamb', dict(lr=1e-2, weight_decay=0.01), SHARDS),
    ('timm.optim', 'Lion', dict(lr=1e-3), HELD),
    ('timm.optim', 'Muon', dict(lr=1e-2), ONE_BY_ONE),
    ('torchao.optim', 'AdamW8bit', dict(lr=1e-2), ONE_BY_ONE),
    ('transformers.optimization', 'Adafactor', dict(lr=None), ONE_BY_ONE),
]


class NoScalars(ToyModel):
    """Weights large enough for 8 bit, and none of 0 dimensions."""

    def __init__(self) -> None:
        super().__init__(scalar=False)
        self.wide = nn.Linear(12, 352)
        self.narrow = nn.Linear(352, 12)

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        return super().forward(inputs + self.narrow(torch.tanh(self.wide(inputs))), labels, mode)


def optimizer_of(package: str, name: str, settings: dict) -> Any:
    def build(net: nn.Module) -> optim.Optimizer:
        optimizer = of(getattr(importlib.import_module(package), name), **settings)(net)
        if hasattr(optimizer, 'train'):
            optimizer.train()
        return optimizer

    return build


def on_rank(case: tuple[str, str, dict, str]) -> list[str]:
    """Compare with DDP."""
    package, name, settings, view = case
    if package.startswith(('timm', 'mmpretrain')):
        models_of(package.split('.')[0])
    build = optimizer_of(package, name, settings)
    model = ZeroModelWrapper(module=NoScalars(), **fields(3))
    if view == REFUSED:
        try:
            ZeroOptimWrapper(build(model.module))
        except ConfigError as error:
            return [] if f'optim_wrapper.optimizer.type: {name}' in str(error) else [str(error)]
        return ['not refused']
    found = type(ZeroOptimWrapper(build(model.module)).engine._step_optimizer.func.__self__).__name__
    faults = [] if found == view else [f'{found} instead of {view}']
    # Clipping rounds gradients otherwise, which some make larger.
    values = compare(*(train(NoScalars, toy_batch, build, wrapper, {}) for wrapper in (fields(3), {})))
    faults += [f'{what} {value:.0e}' for what, value in values.items() if not value <= BOUNDS[what]]
    return faults


@pytest.mark.parametrize('case', CASES, ids=lambda case: f'{case[0].split(".")[0]} {case[1]}')
def test_as_under_ddp_or_refused(case: tuple[str, str, dict, str]) -> None:
    if importlib.util.find_spec(case[0].split('.')[0]) is None:
        pytest.skip(f'{case[0]} is not installed; make test-zoo installs it')
    found = run_ranks(2, on_rank, case)
    assert not any(found), found


class Deep(BaseModel):
    """Says by itself how deep a parameter is, as mmpretrain's constructor asks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(4))
        self.head = nn.Linear(4, 3)
        self.layers[0].requires_grad_(False)

    def get_layer_depth(self, name: str, prefix: str = '') -> tuple[int, int]:
        name = name.removeprefix(prefix)
        return (int(name.split('.')[1]) + 1 if name.startswith('layers') else 5), 6

    def forward(self, inputs: torch.Tensor, mode: str = 'tensor') -> torch.Tensor:
        return inputs


def decayed() -> list[str]:
    models_of('mmpretrain')
    importlib.import_module('mmpretrain.engine')
    cfg = dict(
        optimizer=dict(type='AdamW', lr=0.1, weight_decay=0.05),
        constructor='mmpretrain.LearningRateDecayOptimWrapperConstructor',
        paramwise_cfg=dict(layer_decay_rate=0.7, norm_decay_mult=0.0, bias_decay_mult=0.0),
    )

    def groups(net: nn.Module, kind: str) -> list[dict]:
        names = {id(param): name for name, param in net.named_parameters()}
        wrapper: Any = build_optim_wrapper(net, copy.deepcopy(dict(cfg, type=kind)))
        return [
            {**group, 'params': [names[id(param)] for param in group['params']]}
            for group in wrapper.optimizer.param_groups
        ]

    wanted, faults = groups(Deep(), 'OptimWrapper'), []
    if len({group['lr'] for group in wanted}) < 4:
        faults.append('no decay')
    for stage in range(4):
        policy = dict(type='ModuleClassPolicy', classes=['Sequential'])
        model = ZeroModelWrapper(module=Deep(), stage=stage, wrap_policy=policy)
        found = groups(model.module, 'ZeroOptimWrapper')
        faults += [] if found == wanted else [f'stage {stage}: {found} {wanted}']
    return faults


def test_mmpretrains_decay_makes_the_same_groups() -> None:
    if importlib.util.find_spec('mmpretrain') is None:
        pytest.skip('mmpretrain is not installed; make test-zoo installs it')
    found = run_ranks(2, decayed)
    assert not any(found), found
