"""The forecast of a step, on plans whose sums can be done by hand."""

import pytest
import torch
from torch import nn

from mmzero.config import MeshConfig, OffloadConfig, OverrideConfig, PrecisionConfig, ZeroConfig
from mmzero.engines import Forecast, build_engine
from mmzero.policies import ModuleClassPolicy, WrapPlan, apply_overrides, make_plan, resolve_rules

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


HOST = OffloadConfig(params='cpu', optimizer='cpu')


@pytest.mark.parametrize('stage, copied', [(1, 1), (2, 1), (3, 4)])
def test_what_is_offloaded_is_in_host_memory(stage: int, copied: int) -> None:
    found, usual = step(stage, 4, 2, offload=HOST), step(stage, 4, 2)
    assert found.host == dict(parameters=4 * ALL / 4, gradients=4 * ALL / 4, optimizer=8 * ALL / 4)
    assert found.memory['parameters'] == found.memory['optimizer'] == 0
    # Gathered in forward and in backward of each micro-batch, or once for all of them.
    assert found.to_device == copied * 4 * ALL / 4
    assert found.to_host == (1 if stage == 1 else 2) * 4 * ALL / 4
    assert (found.moved, found.collectives) == (usual.moved, usual.collectives)
    assert not usual.host and not usual.to_device and not usual.to_host


def test_gradients_do_not_stay_on_the_device() -> None:
    # As without offload, but for what was sharded by then. The copy of a shard that is gathered has gone.
    assert step(3, 2, 1, offload=HOST).memory == {
        'parameters': 0,
        'optimizer': 0,
        'gathered': 4 * ROOT + 4 * UNIT,
        'gradients': 4 * UNIT,
        'in flight': 4 * UNIT + 4 * UNIT,
    }
    # One rank alone gathers nothing, and copies what it needs again in backward.
    assert step(3, 1, 1, offload=HOST).to_device == 2 * 4 * ALL


@pytest.mark.parametrize(
    'stage, micro_batches, text',
    [(1, 1, '2a'), (2, 2, '2a'), (1, 2, '2a + 4a'), (3, 2, 'the units alive at once')],
)
def test_closed_formulas_of_offload(stage: int, micro_batches: int, text: str) -> None:
    model = Chain()
    del model.own
    found = step(stage, 4, micro_batches, torch.bfloat16, plan_of(model), offload=HOST)
    assert found.formula == text
    # Beside it: a unit whose gradients are reduced.
    assert 0 <= found.bytes - found.formula_bytes <= 2 * 4 * UNIT


def ruled(ranks: int, **rules) -> WrapPlan:
    """The plan with rules for its last layer."""
    plan = apply_overrides(plan_of(), [OverrideConfig(('layers.3',), **rules)])
    return resolve_rules(plan, ranks, None)


def test_a_unit_that_is_whole_is_averaged_by_all_reduce() -> None:
    plan, found = ruled(4, shard=False), step(3, 4, 1, plan=ruled(4, shard=False))
    assert found.moved == 3 * (ALL - UNIT) * 3 / 4 + 2 * UNIT * 3 / 4
    assert found.memory['parameters'] == 4 * ((ALL - UNIT) / 4 + UNIT)
    assert found.memory['optimizer'] == 8 * ((ALL - UNIT) / 4 + UNIT)
    assert found.formula_moved == 3 * (ALL - UNIT) * 3 / 4
    assert plan.units[3].kept_bytes(4) == 4 * UNIT


def test_a_unit_that_stays_gathered_is_gathered_once() -> None:
    assert step(3, 4, 2, plan=ruled(4, reshard_after_forward=False)).moved == (6 * ALL - 2 * UNIT) * 3 / 4


def test_backward_gathers_among_a_part_of_the_ranks() -> None:
    found, usual = step(3, 8, 1, plan=ruled(8, reshard_after_forward=2)), step(3, 8, 1)
    assert usual.moved - found.moved == UNIT * 7 / 8 - UNIT / 2
    # The last layer is gathered again at once. A layer in the middle waits longer: resharded, half of it is kept.
    early = apply_overrides(plan_of(), [OverrideConfig(('layers.0',), reshard_after_forward=2)])
    assert step(3, 8, 1, plan=early).bytes == usual.bytes + 4 * UNIT / 2


def test_another_dimension_pads_nothing_and_is_copied_into_order() -> None:
    model = nn.Sequential(nn.Linear(64, 10, bias=False))
    plain = make_plan(model, ['0'], 'test')
    ruled_ = resolve_rules(apply_overrides(plain, [OverrideConfig(('0',), shard_dim=1)]), 4, None)
    assert step(3, 4, 1, plan=ruled_).memory['parameters'] == 4 * 640 / 4
    assert step(3, 4, 1, plan=plain).memory['parameters'] == 4 * 3 * 64
    assert step(3, 4, 1, plan=ruled_).moved == 3 * 640 * 3 / 4


def test_a_unit_of_its_own_dtype() -> None:
    plan = ruled(2, param_dtype=torch.float32)
    found = step(2, 2, 2, torch.bfloat16, plan)
    usual = step(2, 2, 2, torch.bfloat16)
    assert found.formula_bytes - usual.formula_bytes == 2 * UNIT
    assert found.moved == usual.moved


class Adapted(nn.Module):
    """A layer of 16 bit, frozen, under a small one in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64, bias=False).bfloat16().requires_grad_(False)
        self.down = nn.Linear(64, 4, bias=False)


@pytest.mark.parametrize('ranks', [2, 4])
def test_a_frozen_base_of_16_bit_has_neither_gradients_nor_state(ranks: int) -> None:
    plan = ModuleClassPolicy(['Adapted'])(nn.Sequential(*(Adapted() for _ in range(4))))
    base, small = 4 * UNIT, 4 * 4 * 64
    lasting = 2 * base + 4 * small + 8 * small
    found = step(3, ranks, 1, plan=plan)
    assert found.memory['parameters'] == (2 * base + 4 * small) / ranks
    assert found.memory['optimizer'] == 8 * small / ranks
    # At most all of what trains, whole; nothing of the base.
    assert found.memory.get('gradients', 0) <= 4 * small
    assert found.formula.startswith('(p + 3t)/N + the units alive at once')
    assert lasting / ranks < found.formula_bytes < (lasting + 2 * base) / ranks + 3 * (2 * UNIT + 4 * 4 * 64)
    assert step(2, ranks, 1, plan=plan).formula.startswith('(p + 3t)/N + gathered p')
    replicated = step(0, ranks, 1, plan=plan)
    assert replicated.formula.startswith('p + 3t')
    assert replicated.formula_bytes == replicated.bytes == lasting + 4 * small
