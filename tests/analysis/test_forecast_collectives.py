"""The forecast number of collectives is what a step has, counted on real ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero.analysis.collectives import CollectiveLog
from mmzero.analysis.step import run_step
from tests.distributed.ranks import run_ranks
from tests.models import DINO_BLOCKS, TinyViT, ToyModel, detection_batch, image_batch, tiny_dino, toy_batch

pytestmark = pytest.mark.distributed

LAYERS = dict(type='ModuleClassPolicy', classes=['Layer'])
BLOCKS = dict(type='ModuleClassPolicy', classes=['Block'])
DINO_UNITS = dict(type='ModuleClassPolicy', classes=list(DINO_BLOCKS))


def frozen_vit() -> nn.Module:
    model = TinyViT(depth=4)
    model.patch.requires_grad_(False)
    model.cls_token.requires_grad = model.position.requires_grad = False
    model.layers[:3].requires_grad_(False)
    return model


def large_vit() -> nn.Module:
    """Its gradients fill several of DDP's buckets, on the borders of which some parameters lie."""
    return TinyViT(width=512, depth=4)


MODELS = dict(
    vit=(TinyViT, image_batch, LAYERS),
    large=(large_vit, image_batch, LAYERS),
    frozen=(frozen_vit, image_batch, LAYERS),
    toy=(ToyModel, toy_batch, BLOCKS),
    dino=(tiny_dino, detection_batch, DINO_UNITS),
)


def counts(model: str, stage: int, micro_batches: int, **fields: Any) -> tuple[dict, dict]:
    """Counted and forecast, of the third step: DDP settles its buckets in the first."""
    torch.manual_seed(0)
    build, batch, policy = MODELS[model]
    wrapped = ZeroModelWrapper(module=build(), stage=stage, **dict(dict(wrap_policy=policy), **fields))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
    optim = ZeroOptimWrapper(optimizer, accumulative_counts=micro_batches, max_skips=None)
    seeds = iter(range(100))
    for _ in range(3):
        with CollectiveLog() as log:
            run_step(wrapped, optim, lambda: batch(100 * dist.get_rank() + next(seeds)))
    forecast = wrapped.engine.forecast(
        wrapped.plan, world_size=dist.get_world_size(), micro_batches=micro_batches, state_itemsize=0
    )
    return log.counts(), dict(sorted(forecast.collectives.items()))


def many(cells: list[tuple[str, int, int, dict]]) -> list[tuple[dict, dict]]:
    return [counts(model, stage, micro_batches, **fields) for model, stage, micro_batches, fields in cells]


CELLS: list[tuple[str, int, int, dict]] = [
    *(('vit', stage, micro_batches, {}) for stage in (0, 1, 2, 3) for micro_batches in (1, 2)),
    ('vit', 3, 1, dict(wrap_policy=None)),
    ('vit', 3, 3, dict(no_sync=True)),
    ('vit', 3, 1, dict(no_sync=True)),
    ('vit', 3, 2, dict(mesh=dict(replicate=2))),
    ('frozen', 3, 2, {}),
    ('frozen', 1, 2, {}),
    ('large', 0, 1, {}),
    *(('toy', stage, 2, dict(find_unused_parameters=True)) for stage in (0, 1, 2, 3)),
]


@pytest.mark.slow
def test_on_two_ranks() -> None:
    for found in run_ranks(2, many, CELLS):
        wrong = [
            f'{cell}: {was} instead of {said}' for cell, (was, said) in zip(CELLS, found, strict=True) if was != said
        ]
        assert not wrong, '\n'.join(wrong)


def test_on_one_rank_units_are_not_communicated() -> None:
    ((found,),) = run_ranks(1, many, [('vit', 3, 1, {})])
    assert found == ({}, {})


@pytest.mark.slow
@pytest.mark.parametrize('stage', [1, 2, 3])
def test_of_dino_the_rest_is_its_own(stage: int) -> None:
    """Its head averages the number of boxes over ranks; units and gradients are as forecast."""
    for ((was, said),) in run_ranks(2, many, [('dino', stage, 1, {})]):
        assert {kind: was[kind] for kind in ('all_gather', 'reduce_scatter')} == said
