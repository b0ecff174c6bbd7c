"""The pair on DeepSpeed trains as stock DDP does, within the design's table "Equal to what, within what"."""

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from mmengine.optim import LinearLR

from mmzero import engines
from mmzero.config import ZeroConfig
from mmzero.wrappers import model as model_wrapper
from tests.distributed.ranks import run_ranks
from tests.distributed.training import compare, train
from tests.models import ToyModel, toy_batch

pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed]

BOUNDS = dict(loss=1e-6, norm=1e-6, update=1e-5)
STAGES = (1, 2, 3)
# Stage 3 partitions what has more than 100 000 elements, here the blocks' large layers, and keeps the rest whole.
WIDTH = 320
batch = functools.partial(toy_batch, width=WIDTH)


class Trainable(ToyModel):
    """ToyModel without what bare DeepSpeed cannot train: 0-dim parameters, and unused ones under weight decay."""

    def __init__(self) -> None:
        super().__init__(width=WIDTH, depth=2, scalar=False)
        del self.unused


@contextmanager
def on_deepspeed() -> Iterator[None]:
    """Let the pair take the DeepSpeed engine, which configs cannot name yet."""
    build = engines.build_engine

    def build_engine(config: ZeroConfig) -> engines.Engine:
        return build(dataclasses.replace(config, engine='deepspeed'))

    model_wrapper.build_engine = build_engine
    try:
        yield
    finally:
        model_wrapper.build_engine = build


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """A group per parameter, the frozen ones too, as MMEngine's paramwise_cfg makes them."""
    groups = [
        dict(params=[param], lr=3e-4 if 'norm' in name else 1e-3, weight_decay=0.0 if 'norm' in name else 0.05)
        for name, param in model.named_parameters()
    ]
    return torch.optim.AdamW(groups, lr=1e-3)


def warm_up(optim: Any) -> LinearLR:
    """Another learning rate in every step."""
    return LinearLR(optim, start_factor=0.2, by_epoch=False, end=4)


CLIP = dict(clip_grad=dict(max_norm=0.5))
# Fields of the optimizer wrapper and micro-batches: three optimizer steps each, the last of a short group in one.
RUNS: dict[str, tuple[dict, int]] = {
    'plain': ({}, 3),
    'clip': (CLIP, 3),
    'clip that does not bite': (dict(clip_grad=dict(max_norm=1e4)), 3),
    'accumulation 2, clip': (dict(CLIP, accumulative_counts=2), 5),
}


def first_gradients(engine: Any) -> dict[Any, torch.Tensor]:
    """Fill in, by parameter, the gradients that DeepSpeed holds before its first step."""
    from deepspeed.utils import safe_get_full_grad

    grads: dict[Any, torch.Tensor] = {}
    step = engine.step

    def keep_and_step(*args: Any, **kwargs: Any) -> Any:
        for param in engine.model.parameters() if not grads else ():
            if param.requires_grad:
                grads[param] = safe_get_full_grad(param).clone()
        return step(*args, **kwargs)

    engine.step = keep_and_step
    return grads


def train_on_deepspeed(stage: int, optim: dict, steps: int) -> dict[str, Any]:
    """One training; gradients are clipped here as torch would, since DeepSpeed's are read before its step."""
    kept: list[Any] = []

    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        engine = engines.engine_of(model.parameters())
        kept.extend((model, first_gradients(engine)))
        return adamw(model)

    with on_deepspeed():
        record = train(Trainable, batch, optimizer, dict(stage=stage), optim, steps, warm_up)
    model, grads = kept
    factor = 1.0
    if optim:
        factor = min(1.0, optim['clip_grad']['max_norm'] / (record['norms'][0] + 1e-6))
    record['grads'] = {name: grads[p] * factor if p in grads else None for name, p in model.named_parameters()}
    return record


def distances(runs: tuple[str, ...], stages: tuple[int, ...] = STAGES) -> dict[str, dict[str, float]]:
    """Runs on every rank: each run under stock DDP once, then on DeepSpeed at each stage."""
    found = {}
    for name in runs:
        optim, steps = RUNS[name]
        reference = train(Trainable, batch, adamw, None, optim, steps, warm_up)
        assert len(reference['norms']) == (3 if optim else 0)
        for stage in stages:
            record = train_on_deepspeed(stage, optim, steps)
            found[f'{name}, stage {stage}'] = compare(record, reference)
    return found


@pytest.mark.parametrize('world_size', [2, 1])
def test_trains_as_under_ddp(world_size: int) -> None:
    for rank, cells in enumerate(run_ranks(world_size, distances, tuple(RUNS))):
        for name, found in cells.items():
            print(world_size, rank, name, {what: f'{value:.1e}' for what, value in found.items()})
            for what, bound in BOUNDS.items():
                assert found[what] <= bound, f'rank {rank}, {name}: {what} {found[what]:.1e} > {bound:.0e}'
