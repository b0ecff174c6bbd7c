"""The pair on DeepSpeed trains as stock DDP does, within the design's table "Equal to what, within what"."""

import functools
import os
from typing import Any

import pytest
import torch
from mmengine.optim import LinearLR

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero.patches import WithCp
from mmzero.registry import CHECKPOINT_PATCHES
from tests.distributed.ranks import run_ranks
from tests.distributed.training import compare, train
from tests.models import ToyModel, toy_batch

pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed]

# The design's bounds in fp32.
BOUNDS = dict(loss=1e-6, norm=1e-6, grad=1e-6, update=1e-5, tensor=1e-4)
STAGES = (1, 2, 3)
# Stage 3 partitions what has more than 100 000 elements, here the blocks' large layers, and keeps the rest whole.
WIDTH = 320
batch = functools.partial(toy_batch, width=WIDTH)


class Trainable(ToyModel):
    """ToyModel without what bare DeepSpeed cannot train: 0-dim parameters, and unused ones under weight decay."""

    def __init__(self) -> None:
        super().__init__(width=WIDTH, depth=2, scalar=False)
        del self.unused


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


def train_on_deepspeed(stage: int, optim: dict, steps: int) -> dict[str, Any]:
    wrapper = dict(stage=stage, engine='deepspeed')
    return train(Trainable, batch, adamw, wrapper, optim, steps, scheduler=warm_up)


def distances(runs: tuple[str, ...], stages: tuple[int, ...] = STAGES) -> dict[str, dict[str, float]]:
    """Runs on every rank: each run under stock DDP once, then on DeepSpeed at each stage."""
    found = {}
    for name in runs:
        optim, steps = RUNS[name]
        reference = train(Trainable, batch, adamw, None, optim, steps, scheduler=warm_up)
        assert len(reference['norms']) == (3 if optim else 0)
        for stage in stages:
            record = train_on_deepspeed(stage, optim, steps)
            found[f'{name}, stage {stage}'] = compare(record, reference)
    return found


@pytest.mark.parametrize('world_size', [2, 1])
def test_trains_as_under_ddp(world_size: int) -> None:
    for rank, cells in enumerate(run_ranks(world_size, distances, tuple(RUNS))):
        for name, found in cells.items():
            for what, bound in BOUNDS.items():
                assert found[what] <= bound, f'rank {rank}, {name}: {what} {found[what]:.1e} > {bound:.0e}'


def pair(stage: int) -> tuple[torch.nn.Module, ZeroOptimWrapper]:
    torch.manual_seed(0)
    model = ZeroModelWrapper(module=Trainable(), stage=stage, engine='deepspeed')
    return model, ZeroOptimWrapper(adamw(model))


def saved_and_loaded(stage: int) -> list[str]:
    """Runs on every rank: weights loaded into a bound engine are there after the next step, and are read back whole."""
    model, optim = pair(stage)
    engine, rank = model.engine, torch.distributed.get_rank()
    before = engine.model_state()
    model.train_step(batch(rank), optim)
    moved = engine.model_state()
    assert bool(moved) == (rank == 0)
    faults = [name for name, value in before.items() if 'frozen' not in name and torch.equal(value, moved[name])]
    # What is not in the file stays as it is.
    loaded = {name: value + 1 for name, value in moved.items() if not name.startswith('blocks.0')}
    engine.load_model_state(loaded)
    read = engine.model_state()
    faults += [
        f'{name} after load' for name, value in {**moved, **loaded}.items() if not torch.equal(read[name], value)
    ]
    for group in optim.param_groups:
        group['lr'] = 0.0
    model.train_step(batch(rank), optim)
    after = engine.model_state()
    faults += [f'{name} after a step' for name, value in read.items() if not torch.equal(after[name], value)]
    faults += [] if len(model.eval().val_step(batch(rank))) == 4 else ['val_step']
    return faults


def large_parameters(stage: int) -> tuple[int, int]:
    """Runs on every rank: number and elements of the large layers' storages between steps."""
    model, optim = pair(stage)
    model.train_step(batch(0), optim)
    large = [param for param in model.parameters() if getattr(param, 'ds_numel', param.numel()) > 100_000]
    return len(large), sum(param.numel() for param in large)


def state() -> tuple[list, list]:
    return [saved_and_loaded(stage) for stage in STAGES], [large_parameters(stage) for stage in STAGES]


def test_state() -> None:
    """Loaded weights survive the next step, and stage 3 is stage 3: of what is large no rank keeps the whole."""
    # Two blocks of two layers of 320 x 640, the stem and the frozen layer of 320 x 320.
    whole = 4 * 320 * 640 + 2 * 320 * 320
    for faults, large in run_ranks(2, state):
        assert faults == [[], [], []]
        assert large == [(6, whole), (6, whole), (6, 0)]


def alone() -> list[float]:
    """A hand-written loop without a launcher's variables."""
    del os.environ['LOCAL_RANK']
    model, optim = pair(2)
    assert 'LOCAL_RANK' not in os.environ
    return [float(model.train_step(batch(0), optim)['loss']) for _ in range(3)]


def test_pair_on_a_group_of_one() -> None:
    (losses,) = run_ranks(1, alone)
    assert losses[-1] < losses[0]


class Reentrant(torch.nn.Module):
    """A block with a re-entrant checkpoint of its own, as blocks of mmdet have it."""

    def __init__(self, inner: torch.nn.Module, with_cp: bool) -> None:
        super().__init__()
        self.inner = inner
        self.with_cp = with_cp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.with_cp and x.requires_grad:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True)
        return self.inner(x)


class Twice(Trainable):
    """Its first block runs twice."""

    def __init__(self, with_cp: bool) -> None:
        super().__init__()
        self.blocks[0] = Reentrant(self.blocks[0], with_cp)
        self.blocks.append(self.blocks[0])


def losses_of_twice(with_cp: bool) -> list[float] | str:
    torch.manual_seed(0)
    model = ZeroModelWrapper(module=Twice(with_cp), stage=2, engine='deepspeed')
    optim = ZeroOptimWrapper(adamw(model))
    try:
        return [float(model.train_step(batch(step), optim)['loss'].detach()) for step in range(3)]
    except AssertionError as error:
        return str(error)


def stock_and_patched() -> list[Any]:
    found = [losses_of_twice(False)]
    # As long as no patch is registered for its class, the block's own checkpoint stays.
    found.append(losses_of_twice(True))
    CHECKPOINT_PATCHES.register_module(name='Reentrant', module=WithCp)
    return [*found, losses_of_twice(True)]


def test_a_block_with_cp_that_runs_twice() -> None:
    """Red: DeepSpeed takes the gradient of each run for the whole. Green: without re-entrance it comes once."""
    for plain, stock, patched in run_ranks(2, stock_and_patched):
        assert 'has already been reduced' in stock
        assert patched == plain
