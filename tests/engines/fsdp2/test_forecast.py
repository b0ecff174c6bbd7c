"""The forecast of a step, on plans whose sums can be done by hand."""

import pytest
import torch
from torch import nn

from mmzero.config import ZeroConfig
from mmzero.config.zero import MeshConfig, PrecisionConfig
from mmzero.engines import Forecast, build_engine
from mmzero.policies import ModuleClassPolicy, WrapPlan, make_plan

# 4 units of 64 x 64 and a root of 16 x 64: elements.
UNIT, ROOT = 64 * 64, 16 * 64
ALL = 4 * UNIT + ROOT


class Chain(nn.Module):
    """Alike layers, and a parameter of the root's own before them."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.empty(16, 64))
        self.layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))


def plan_of(model: nn.Module | None = None) -> WrapPlan:
    return ModuleClassPolicy(['Linear'])(model or Chain())


def step(
    stage: int, ranks: int, micro_batches: int, dtype: torch.dtype | None = None, plan: WrapPlan | None = None, **config
) -> Forecast:
    engine = build_engine(ZeroConfig(stage=stage, precision=PrecisionConfig(param_dtype=dtype), **config))
    return engine.forecast(plan or plan_of(), world_size=ranks, micro_batches=micro_batches, state_itemsize=8)


@pytest.mark.parametrize('ranks', [2, 4, 8])
def test_stage_1_accumulates_whole_gradients(ranks: int) -> None:
    found = step(1, ranks, 4, torch.bfloat16).memory
    # The second backward is at its end: nothing is reduced yet, and each fresh gradient was added to the whole ones.
    assert found['parameters'] == 4 * ALL / ranks and found['optimizer'] == 8 * ALL / ranks
    assert found['gathered'] == 2 * 4 * UNIT + 4 * ROOT
    assert found['gradients'] == 4 * ALL + 2 * UNIT


@pytest.mark.parametrize('ranks', [2, 4, 8])
def test_stages_1_and_2_are_one_for_one_micro_batch(ranks: int) -> None:
    assert step(1, ranks, 1) == step(2, ranks, 1)
    assert step(1, ranks, 2).memory != step(2, ranks, 2).memory


def test_stage_3_holds_units_one_by_one() -> None:
    # The second layer's backward is over: it is still gathered, its gradients are whole, those of the last two are
    # sharded, the buffer of the last reduction is held, and the first layer is on its way.
    assert step(3, 2, 1).memory == {
        'parameters': 4 * ALL / 2,
        'optimizer': 8 * ALL / 2,
        'gathered': 4 * ROOT + 4 * UNIT,
        'gradients': 2 * (4 * UNIT / 2) + 4 * UNIT,
        'in flight': 4 * UNIT + 4 * UNIT,
    }


@pytest.mark.parametrize(
    'stage, micro_batches, times',
    [(0, 1, 2), (0, 4, 2), (1, 1, 2), (1, 4, 2), (2, 1, 2), (2, 4, 5), (3, 1, 3), (3, 4, 12)],
)
@pytest.mark.parametrize('ranks', [1, 2, 4])
def test_traffic_is_the_stage_tables(stage: int, micro_batches: int, times: int, ranks: int) -> None:
    found = step(stage, ranks, micro_batches)
    assert found.moved == times * ALL * (ranks - 1) / ranks
    assert found.moved_formula == f'{times}a'


def test_padding_counts() -> None:
    plan = make_plan(nn.Linear(10, 3, bias=False), (), 'test')
    assert step(3, 2, 1, plan=plan).moved == 3 * 4 * 10 / 2
    assert step(3, 2, 1, plan=plan).memory['parameters'] == 4 * 2 * 10


def test_replicas_add_an_all_reduce_of_the_shard() -> None:
    found = step(3, 8, 1, mesh=MeshConfig(replicate=2))
    assert found.moved == 3 * ALL * 3 / 4 + 2 * (ALL / 4) / 2
    assert found.memory == step(3, 4, 1).memory


def test_what_is_frozen_has_neither_gradients_nor_state() -> None:
    model = Chain()
    model.requires_grad_(False)
    model.layers[3].requires_grad_(True)
    found = step(3, 2, 1, plan=plan_of(model))
    assert found.memory['optimizer'] == 8 * UNIT / 2
    # Autograd ends at the last layer: the others are gathered for forward alone, but for the one before, which is
    # prefetched in vain; the root is gathered for both.
    assert found.moved == (3 * UNIT + UNIT + 2 * UNIT + 2 * ROOT + UNIT) / 2


@pytest.mark.parametrize(
    'stage, micro_batches, text',
    [
        (0, 1, '16a'),
        (0, 2, '20a'),
        (1, 1, '12a/N + max(2a, 4a/N)'),
        (2, 1, '12a/N + max(2a, 4a/N)'),
        (1, 2, '12a/N + 2a + 4a'),
        (2, 2, '16a/N + 2a'),
        (3, 2, '16a/N + the units alive at once'),
    ],
)
def test_closed_formulas(stage: int, micro_batches: int, text: str) -> None:
    model = Chain()
    del model.own
    found = step(stage, 4, micro_batches, torch.bfloat16, plan_of(model))
    assert found.formula == text
    # They know no units, of which one is a fifth of this model.
    assert found.bytes == pytest.approx(found.formula_bytes, rel=0.25)
