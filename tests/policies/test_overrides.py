"""Rules reach the units that patterns name, and what they ask for fits the ranks."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from mmzero.config import OverrideConfig
from mmzero.errors import ConfigError
from mmzero.policies import Unit, UnitRules, WrapPlan, apply_overrides, make_plan, replicated, resolve_rules


@pytest.fixture
def plan(net) -> WrapPlan:
    """Units of all blocks, one of which holds another."""
    return make_plan(net, ['blocks.0', 'blocks.1', 'blocks.1.inner', 'stem'], 'test')


def entry(units, **rules) -> OverrideConfig:
    """One entry, of one pattern or several."""
    return OverrideConfig((units,) if isinstance(units, str) else tuple(units), **rules)


def rules_of(plan: WrapPlan) -> dict[str, UnitRules]:
    """By unit."""
    return {unit.name: unit.rules for unit in plan.units}


@pytest.mark.parametrize(
    ('pattern', 'units'),
    [
        ('blocks.0', {'blocks.0'}),
        ('blocks.*', {'blocks.0', 'blocks.1', 'blocks.1.inner'}),
        ('blocks', {'blocks.0', 'blocks.1', 'blocks.1.inner'}),
        ('**.inner', {'blocks.1.inner'}),
        ('(root)', {''}),
        ('**', {'blocks.0', 'blocks.1', 'blocks.1.inner', 'stem', ''}),
    ],
)
def test_units_that_a_pattern_names(plan, pattern, units):
    found = rules_of(apply_overrides(plan, [entry(pattern, shard=False)]))
    assert {name for name, rules in found.items() if not rules.shard} == units


def test_nothing_else_changes(plan):
    assert apply_overrides(plan, []) == plan
    changed = apply_overrides(plan, [entry('stem', shard_dim=1)])
    assert [unit.params for unit in changed.units] == [unit.params for unit in plan.units]
    assert rules_of(plan)['stem'] == UnitRules()


def test_later_entries_win_field_by_field(plan):
    entries = [
        entry('blocks.*', reshard_after_forward=False, param_dtype=torch.bfloat16),
        entry('blocks.1', reshard_after_forward='node'),
        entry('blocks.1.inner', reshard_after_forward=True, cast_forward_inputs=False),
    ]
    found = rules_of(apply_overrides(plan, entries))
    assert found['blocks.0'] == UnitRules(False, torch.bfloat16)
    assert found['blocks.1'] == UnitRules('node', torch.bfloat16)
    assert found['blocks.1.inner'] == UnitRules(True, torch.bfloat16, False)
    assert found['stem'] == UnitRules()


def test_what_is_whole_has_no_shards_to_rule(plan):
    entries = [entry('**', reshard_after_forward='node', shard_dim=1), entry('stem', shard=False)]
    assert rules_of(apply_overrides(plan, entries))['stem'] == UnitRules(shard=False)
    with pytest.raises(ConfigError) as caught:
        apply_overrides(plan, entries[::-1])
    assert caught.value.faults == (
        'model_wrapper_cfg.overrides[1].reshard_after_forward: is for stem, which overrides[0] leaves whole by '
        'shard=False; leave stem out of one of them',
        'model_wrapper_cfg.overrides[1].shard_dim: is for stem, which overrides[0] leaves whole by shard=False; leave '
        'stem out of one of them',
    )
    back = [*entries[1:], entry('stem', shard=True, shard_dim=1)]
    assert rules_of(apply_overrides(plan, back))['stem'] == UnitRules(shard_dim=1)


def test_patterns_that_name_no_unit_are_told_together(plan):
    with pytest.raises(ConfigError) as caught:
        apply_overrides(plan, [entry(['blocks.*', 'stm'], shard=False), entry('blocks.0.inner', shard=False)])
    first, second = caught.value.faults
    assert first == "model_wrapper_cfg.overrides[0].units: 'stm' names no unit; did you mean 'stem'?"
    assert second.startswith("model_wrapper_cfg.overrides[1].units: 'blocks.0.inner' names no unit; did you mean")


@pytest.mark.parametrize(
    ('ranks', 'per_node', 'rule'),
    [(8, 4, 4), (8, 2, 2), (8, 8, True), (8, 16, True), (8, 1, False), (1, 1, True), (4, 8, True)],
)
def test_a_node_is_what_the_launcher_says(plan, ranks, per_node, rule):
    found = resolve_rules(apply_overrides(plan, [entry('stem', reshard_after_forward='node')]), ranks, per_node)
    assert rules_of(found)['stem'].reshard_after_forward is rule or rule == 4
    assert rules_of(found)['stem'].reshard_after_forward == rule
    assert rules_of(found)['blocks.0'].reshard_after_forward is None


@pytest.mark.parametrize(
    ('rule', 'ranks', 'per_node', 'fault'),
    [
        (
            3,
            8,
            None,
            'reshard_after_forward=3 does not divide the 8 rank(s) of the shard dimension; proper divisors: 2, 4 (for',
        ),
        (8, 8, None, 'proper divisors: 2, 4'),
        (16, 8, None, 'proper divisors: 2, 4'),
        (2, 2, None, 'it has none: use True or False'),
        (2, 1, None, 'it has none: use True or False'),
        ('node', 8, 6, "reshard_after_forward='node', 6 ranks does not divide the 8"),
        ('node', 8, None, 'needs the number of ranks on a node, which torchrun and MPI set in the environment'),
    ],
)
def test_ranks_that_cannot_be_resharded_to(plan, rule, ranks, per_node, fault):
    with pytest.raises(ConfigError) as caught:
        resolve_rules(apply_overrides(plan, [entry('stem', reshard_after_forward=rule)]), ranks, per_node)
    assert len(caught.value.faults) == 1 and fault in str(caught.value)


def test_proper_divisors_stay(plan):
    found = resolve_rules(apply_overrides(plan, [entry('**', reshard_after_forward=2)]), 8, None)
    assert {rules.reshard_after_forward for rules in rules_of(found).values()} == {2}


class Rows(nn.Module):
    """Parameters of two and of one dimension."""

    def __init__(self, *shapes) -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            self.register_parameter(f'p{index}', nn.Parameter(torch.zeros(shape)))


def split(shard_dim, ranks, *shapes) -> WrapPlan:
    """The plan of one unit 'u' of these shapes."""
    plan = make_plan(nn.ModuleDict(dict(u=Rows(*shapes), v=Rows(*shapes))), ['u', 'v'], 'test')
    return resolve_rules(apply_overrides(plan, [entry('*', shard_dim=shard_dim)]), ranks, None)


def test_what_does_not_divide_is_split_along_dim_0():
    plan = split(1, 4, (3, 8), (4,), (5, 6))
    unit: Unit = plan.units[0]
    assert unit.shard_dims(4) == (1, 0, 0)
    assert unit.kept_numels(4) == (3 * 2, 1, 2 * 6)
    assert plan.notes == ('u, v: split along dim 0, since dim 1 does not divide by 4: p2 (5, 6)',)


def test_dim_0_is_what_is_done_anyway():
    assert split(0, 4, (3, 8)).notes == ()


def test_dimension_that_nothing_can_be_split_along():
    with pytest.raises(ConfigError) as caught:
        split(1, 4, (3, 6), (4,))
    assert caught.value.faults == (
        'model_wrapper_cfg.overrides: shard_dim=1: no parameter has a dim 1 that divides by 4, the ranks of the shard '
        'dimension: p0 (3, 6), p1 (4,); leave shard_dim out (for u, v)',
    )


def test_another_dimension_and_part_of_the_ranks_do_not_go_together(plan):
    entries = [entry('stem', shard_dim=1, reshard_after_forward=2)]
    stem = make_plan(nn.ModuleDict(dict(stem=nn.Linear(4, 4))), ['stem'], 'test')
    with pytest.raises(ConfigError, match='shard_dim=1 beside reshard_after_forward to part of the ranks'):
        resolve_rules(apply_overrides(stem, entries), 4, None)


def test_bytes_of_a_unit_that_is_not_sharded(plan):
    stem = next(u for u in apply_overrides(plan, [entry('stem', shard=False)]).units if u.name == 'stem')
    assert stem.kept_bytes(8) == stem.gathered_bytes() == 4 * 16
    assert stem.trained_numel(8) == 16


def test_what_is_replicated_is_on_the_plan(plan):
    found = apply_overrides(plan, [entry(['stem', '(root)'], shard=False)])
    whole = (('blocks.0.up.bias', 'is odd'),)
    units = tuple(replace(unit, whole=whole if unit.name == 'blocks.0' else ()) for unit in found.units)
    reasons = {item.reason: item.params for item in replicated(replace(found, units=units))}
    assert reasons['is odd'] == ('blocks.0.up.bias',)
    assert {'stem.weight', 'head.weight'} < set(reasons['shard=False'])
    kept = dict(zip(units[1].params, units[1].kept_numels(4), strict=True))
    assert units[1].name == 'blocks.0' and kept['blocks.0.up.bias'] == 4 and kept['blocks.0.up.weight'] == 4
