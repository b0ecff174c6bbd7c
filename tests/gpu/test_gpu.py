"""What only a GPU can show: the pair on CUDA with NCCL. Run `pytest tests/gpu` where there is one."""

import functools

import pytest
import torch

from tests.distributed.ranks import run_ranks
from tests.distributed.test_parity import BLOCKS, BOUNDS, DINO_UNITS, adamw
from tests.distributed.training import compare, train
from tests.models import ToyModel, detection_batch, tiny_dino, toy_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU'),
]


def toys() -> dict[str, dict[str, float]]:
    optim = dict(clip_grad=dict(max_norm=0.1))
    reference = train(ToyModel, toy_batch, adamw, dict(stage=0, find_unused_parameters=True), optim)
    return {
        f'stage{stage}': compare(
            train(ToyModel, toy_batch, adamw, dict(stage=stage, wrap_policy=BLOCKS), optim), reference
        )
        for stage in (1, 2, 3)
    }


def test_stages_equal_ddp_on_cuda() -> None:
    for name, found in run_ranks(torch.cuda.device_count(), toys, backend='nccl')[0].items():
        assert all(found[what] <= bound for what, bound in BOUNDS.items()), (name, found)


def bf16_dino() -> dict[str, list[float]]:
    optim = dict(clip_grad=dict(max_norm=0.1), dtype='bfloat16')
    build = functools.partial(tiny_dino)
    losses = {}
    for stage in (0, 1, 3):
        wrapper = dict(stage=stage, wrap_policy=DINO_UNITS, precision=dict(param_dtype='bfloat16'))
        losses[f'stage{stage}'] = train(build, detection_batch, adamw, wrapper, optim)['losses']
    return losses


def test_bf16_dino_trains_on_cuda() -> None:
    losses = run_ranks(torch.cuda.device_count(), bf16_dino, backend='nccl')[0]
    for stage in ('stage1', 'stage3'):
        assert losses[stage] == pytest.approx(losses['stage0'], rel=0.05)
