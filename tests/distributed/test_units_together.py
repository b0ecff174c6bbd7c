"""A unit that not every rank runs is named on all ranks, before anything waits for it or is exchanged."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.model import BaseModel
from torch import nn

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero.errors import PlanError
from tests.distributed.ranks import run_ranks
from tests.models import Block, toy_batch

pytestmark = pytest.mark.distributed

BLOCKS = dict(type='ModuleClassPolicy', classes=['Block'])


class Branching(BaseModel):
    """Runs its blocks in an order that differs from rank to rank."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.blocks, self.head = way, nn.ModuleList(Block(12, False) for _ in range(3)), nn.Linear(12, 7)

    def order(self, mode: str) -> list[int]:
        last = dist.get_rank() == dist.get_world_size() - 1
        if not last or (self.way == 'left out in val' and mode == 'loss'):
            return [0, 1, 2]
        return {'left out': [0, 1], 'left out in val': [0, 1], 'other order': [1, 0, 2], 'twice': [0, 1, 2, 2]}[
            self.way
        ]

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        if self.way == 'fails' and dist.get_rank() == 0:
            raise KeyError('a mistake of rank 0')
        for index in [0] if self.way == 'fails' else self.order(mode):
            inputs = self.blocks[index](inputs)
        logits = self.head(inputs)
        return dict(loss=nn.functional.cross_entropy(logits, labels)) if mode == 'loss' else list(logits)


def said(way: str) -> str:
    """The error of a first iteration."""
    model = ZeroModelWrapper(module=Branching(way), wrap_policy=BLOCKS, find_unused_parameters=True)
    optim = ZeroOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    optim.initialize_count_status(model, 0, 10)
    try:
        model.train_step(toy_batch(0), optim)
        with torch.no_grad():
            model.val_step(toy_batch(0))
    except (PlanError, RuntimeError, KeyError) as error:
        return f'{type(error).__name__}: {error}'
    return 'nothing'


WAYS = ('left out', 'left out in val', 'other order', 'twice', 'fails')


def run_ways() -> dict[str, str]:
    return {way: said(way) for way in WAYS}


@pytest.mark.parametrize('ranks', [2, pytest.param(4, marks=pytest.mark.slow)])
def test_units_that_not_every_rank_runs_are_named(ranks: int) -> None:
    found = run_ranks(ranks, run_ways, timeout=120)
    last = ranks - 1
    end, unit = 'has come to the end of its forward', 'is about to run the unit blocks.2 (Block)'
    for texts in found:
        for way in ('left out', 'left out in val'):
            pairs = [f'rank {rank} {unit}, while rank {last} {end}' for rank in range(last)]
            assert any(
                f'PlanError: {pair}' in texts[way] for pair in [*pairs, f'rank {last} {end}, while rank 0 {unit}']
            )
            assert 'leave Block out of wrap_policy' in texts[way]
        assert 'the unit blocks.0 (Block)' in texts['other order'] and 'the unit blocks.1' in texts['other order']
        assert unit in texts['twice'] and end in texts['twice']
    assert found[0]['fails'] == "KeyError: 'a mistake of rank 0'"
    assert {texts['fails'] for texts in found[1:]} == {
        "OtherRankError: rank 0 failed with KeyError: 'a mistake of rank 0'"
    }
