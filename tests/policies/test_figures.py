"""Bytes of a plan, against sums done by hand."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from mmzero.policies import Gathering, ModuleClassPolicy, make_plan, plan_figures, replicated
from mmzero.policies.figures import most_padded
from mmzero.policies.unit import UnitRules

UNIT = 4 * 64 * 64


def chain(*widths: int) -> nn.Sequential:
    """Layers of 64 x (64 times a width) and nothing in the root."""
    return nn.Sequential(*(nn.Linear(64 * width, 64, bias=False, device='meta') for width in widths))


def plan_of(*widths: int, **rules: UnitRules):
    """One unit a layer; rules by the layer's index, ``_0`` for the first."""
    plan = ModuleClassPolicy(['Linear'])(chain(*widths))
    units = [replace(unit, rules=rules.get(f'_{unit.name}', unit.rules)) for unit in plan.units]
    return replace(plan, units=tuple(units))


def peak(plan, shard: int = 2, **gathering) -> int:
    return plan_figures(plan, Gathering(shard=shard, **gathering)).peak_gathered_bytes


def test_units_come_as_they_are_registered():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.deep = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
            self.flat = nn.Linear(2, 2)
            self.late = nn.Sequential(nn.Linear(2, 2))

    # A plan lists the deepest first.
    plan = ModuleClassPolicy(['Linear'])(Net())
    figures = plan_figures(plan, Gathering())
    assert [item.unit.name for item in figures.units] == ['deep.0.0', 'flat', 'late.0', '']


def test_bytes_and_padding_of_a_unit():
    plan = make_plan(nn.Sequential(nn.Linear(5, 3, bias=False)), ['0'], 'test')
    unit, root = plan_figures(plan, Gathering(shard=2, param_dtype=torch.bfloat16)).units
    assert (unit.gathered_bytes, unit.kept_bytes) == (2 * 2 * 2 * 5, 4 * 2 * 5)
    assert unit.padding == pytest.approx(4 / 3) and unit.dtypes == ('bfloat16',)
    assert (root.gathered_bytes, root.kept_bytes, root.padding, root.dtypes) == (0, 0, 1.0, ())


def test_dtype_is_the_rules_then_the_configs_then_as_stored():
    plan = plan_of(1, 1, _1=UnitRules(param_dtype=torch.float32))
    first, second, root = plan_figures(plan, Gathering(param_dtype=torch.bfloat16)).units
    assert (first.dtypes, first.gathered_bytes) == (('bfloat16',), UNIT / 2)
    assert (second.dtypes, second.gathered_bytes) == (('float32',), UNIT)
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False).to(torch.bfloat16))
    (root,) = plan_figures(make_plan(model, (), 'test'), Gathering(param_dtype=torch.float16)).units
    assert (root.dtypes, root.gathered_bytes) == (('bfloat16', 'float32'), 4 * 4 + 4 * 2)


def test_what_is_not_sharded_is_kept_whole():
    plan = plan_of(1, 1, _0=UnitRules(shard=False))
    whole, split, _ = plan_figures(plan, Gathering(shard=4)).units
    assert (whole.ranks, whole.gathered_bytes, whole.kept_bytes, whole.padding) == (1, UNIT, UNIT, 1.0)
    assert (split.ranks, split.kept_bytes) == (4, UNIT / 4)


def test_scalars_are_kept_and_not_gathered(net):
    root = plan_figures(make_plan(net, ['stem', 'blocks', 'head'], 'test'), Gathering(shard=2)).root
    assert (root.gathered_bytes, root.kept_bytes, root.padding) == (0, 4, 1.0)


@pytest.mark.parametrize(
    ('widths', 'units'),
    [
        ((1, 1, 1), 2),
        ((3, 1, 1), 4),  # the largest and its neighbour
        ((3, 1, 2, 2), 4),  # 3 + 1 as much as 2 + 2
        ((3, 1, 2, 3), 5),  # not the two largest, which are apart
        ((2,), 2),
    ],
)
def test_peak_is_of_two_consecutive_units(widths, units):
    assert peak(plan_of(*widths)) == units * UNIT


def test_peak_of_the_root_alone():
    assert peak(make_plan(chain(1, 1), (), 'test')) == 2 * UNIT


def test_peak_holds_the_root():
    model = chain(1, 1, 1)
    plan = make_plan(model, ['0'], 'test')
    assert peak(plan) == UNIT + 2 * UNIT


def test_peak_holds_what_encloses_a_unit():
    model = nn.Sequential(chain(1, 1, 1), chain(1))
    inner = make_plan(model, ['0', '0.1', '0.2', '1'], 'test')
    # Of the first chain the third layer and what encloses it, besides the second.
    assert peak(inner) == 3 * UNIT


@pytest.mark.parametrize(
    ('reshard', 'stays', 'units'),
    [
        (None, False, 2),
        (None, True, 4),
        (False, False, 3),  # the first stays, besides two of the others
        (True, True, 4),  # all but the first stay, and it is gathered
        (4, False, 2 + 1 / 4),
    ],
)
def test_peak_holds_what_stays(reshard, stays, units):
    plan = plan_of(1, 1, 1, 1, _0=UnitRules(reshard_after_forward=reshard))
    assert peak(plan, shard=8, stays=stays) == units * UNIT


def test_replicated_says_why(net):
    plan = make_plan(net, ['blocks.0'], 'test')
    units = (replace(plan.units[0], rules=UnitRules(shard=False)), plan.root)
    scalars, whole = replicated(replace(plan, units=units))
    assert scalars.params == ('scale',) and '0-dim' in scalars.reason
    assert whole.params == plan.units[0].params and whole.reason == 'shard=False'
    assert replicated(plan_of(1)) == ()


def test_most_padded():
    plan = make_plan(nn.Sequential(nn.Linear(4, 4), nn.Linear(64, 3)), (), 'test')
    assert most_padded(plan_figures(plan, Gathering(shard=4)).units) == ('1.weight', 3, 4)
    assert most_padded(plan_figures(plan, Gathering(shard=1)).units) is None
