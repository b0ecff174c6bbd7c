"""The tree of a plan shows where units lie and what is left."""

from dataclasses import replace

from torch import nn

from mmzero.policies import Gathering, make_plan, plan_figures, plan_tree
from mmzero.policies.unit import UnitRules


def tree_of(plan):
    return plan_tree(plan_figures(plan, Gathering())).splitlines()


def test_alike_siblings_are_one_and_the_roots_remainder_is_shown(net):
    lines = tree_of(make_plan(net, ['blocks.0', 'blocks.1'], 'test'))
    assert lines == [
        '(root) [Net]: 75 parameters, 0.00 MiB in float32',
        '|- scale: 1 in the root',
        '|- stem: 16 in the root',
        '|- blocks: 48 in the root',
        '|  |- 0-1 [Block x 2]: 48 parameters, 0.00 MiB in float32',
        '|  `- 2: 48 in the root',
        '`- head: 10 in the root',
    ]


def test_modules_that_hold_one_thing_are_one_line():
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), nn.Linear(2, 2))
    lines = tree_of(make_plan(model, ['0.0.0', '0.0.1', '1'], 'test'))
    assert [line.split(' [')[0] for line in lines] == ['(root)', '|- 0.0.0-1', '`- 1']


def test_units_in_units_lie_below_them_and_are_not_joined(net):
    lines = tree_of(make_plan(net, ['blocks.0', 'blocks.0.inner', 'blocks.1', 'blocks.1.inner'], 'test'))
    assert [line.split(':')[0] for line in lines[3:8]] == [
        '|- blocks',
        '|  |- 0 [Block]',
        '|  |  `- inner [Sequential]',
        '|  |- 1 [Block]',
        '|  |  `- inner [Sequential]',
    ]


def test_rules_are_shown(net):
    plan = make_plan(net, ['stem'], 'test')
    units = (replace(plan.units[0], rules=UnitRules(shard=False)), plan.root)
    assert any(line.endswith('; shard=False') for line in tree_of(replace(plan, units=units)))


def test_one_unit(net):
    assert len(tree_of(make_plan(net, (), 'test'))) == 5
