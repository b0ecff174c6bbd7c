"""Ranks that hold different amounts of a parameter, or nothing at all of it."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.ranks import run_ranks
from tests.distributed.training import compare, train
from tests.models import ToyModel, toy_batch
from tests.vectors import vector_runner

pytestmark = pytest.mark.distributed


class Awkward(ToyModel):
    """A parameter registered twice, one shorter than the ranks, and a buffer of a dtype that gloo does not know."""

    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.full((2, 12), 0.1))
        self.first, self.second = nn.Linear(12, 2, bias=False), nn.Linear(12, 2, bias=False)
        self.first.weight = self.second.weight = weight
        self.register_buffer('numbers', torch.arange(4, dtype=torch.int16))

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        inputs = inputs + (self.first(inputs) * self.second(inputs)).sum(1, keepdim=True)
        return super().forward(inputs, labels, mode)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)


def infinity_norm() -> dict[str, float]:
    optim = dict(clip_grad=dict(max_norm=0.01, norm_type='inf'))
    sharded = dict(stage=3, find_unused_parameters=True)
    return compare(
        train(Awkward, toy_batch, adam, sharded, optim), train(Awkward, toy_batch, adam, dict(sharded, stage=0), optim)
    )


def test_infinity_norm_with_empty_shards() -> None:
    for found in run_ranks(3, infinity_norm):
        assert found['loss'] <= 1e-6 and found['norm'] <= 1e-6 and found['update'] <= 1e-5, found


def train_and_resume(folder: str) -> bool:
    """Builds from a config, so that ranks other than 0 build on meta."""
    build = functools.partial(vector_runner, model=dict(type=Awkward), launcher='pytorch')
    build(folder).train()
    resumed = build(folder, resume=True)
    resumed.train()
    return bool((resumed.model.module.numbers == torch.arange(4)).all())


def test_awkward_model_trains_and_resumes(tmp_path: Path) -> None:
    assert run_ranks(2, train_and_resume, str(tmp_path)) == [True, True]
    assert 'second.weight' in torch.load(tmp_path / 'epoch_1.pth')['state_dict']
