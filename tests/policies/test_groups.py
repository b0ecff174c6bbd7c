"""Alike units, and their common name."""

from dataclasses import replace

import pytest
from torch import nn

from mmzero.policies import Gathering, ModuleClassPolicy, plan_figures
from mmzero.policies.groups import alike, common_name
from mmzero.policies.unit import UnitRules


@pytest.mark.parametrize(
    ('names', 'common'),
    [
        (['a.0'], 'a.0'),
        (['a.0', 'a.1', 'a.2'], 'a.0-2'),
        (['a.1', 'a.3', 'a.5'], 'a.1,3,5'),
        (['a.1', 'a.3', 'a.5', 'a.7', 'a.9'], 'a.*'),
        (['s.0.b.0', 's.0.b.1', 's.1.b.0', 's.1.b.1'], 's.0-1.b.0-1'),
        (['left.b', 'right.b'], '*.b'),
        (['a.0', 'b'], 'a.0, ...'),
        (['a.10', 'a.9'], 'a.9-10'),
    ],
)
def test_common_name(names, common):
    assert common_name(names) == common


def test_alike_are_those_of_one_class_shape_dtype_rules_and_use():
    model = nn.Sequential(*(nn.Linear(2, 2, device='meta') for _ in range(6)), nn.Linear(2, 3), nn.Bilinear(1, 2, 2))
    model[1].requires_grad_(False)
    model[2].bfloat16()
    plan = ModuleClassPolicy(['Linear', 'Bilinear'])(model)
    rules = UnitRules(reshard_after_forward=False)
    units = tuple(replace(unit, rules=rules) if unit.name == '3' else unit for unit in plan.units)
    groups = alike(plan_figures(replace(plan, units=units), Gathering()).units[:-1])
    assert [[item.unit.name for item in group] for group in groups] == [
        ['0', '4', '5'],
        ['1'],
        ['2'],
        ['3'],
        ['6'],
        ['7'],
    ]
