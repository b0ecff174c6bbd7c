"""Policies by name, size and depth, and policies made of policies."""

import functools

import pytest
import torch
from mmengine.registry import FUNCTIONS
from torch import nn
from torch.distributed.fsdp import wrap

from mmzero.errors import PlanError
from mmzero.policies import (
    AllOf,
    AnyOf,
    DepthPolicy,
    ModuleClassPolicy,
    ModuleNamePolicy,
    Not,
    SizePolicy,
    build_policy,
)
from tests.policies.strange import Bellows, Fan, Necklace, Pleat


def units(policy, model):
    return sorted(unit.name for unit in policy(model).units[:-1])


BEADS_OF_A = ['rings.a.beads.0', 'rings.a.beads.1', 'rings.a.beads.2']


@pytest.mark.parametrize(
    ('pattern', 'expected'),
    [
        ('rings.a.beads.*', BEADS_OF_A),
        ('rings.a.beads.[12]', BEADS_OF_A[1:]),
        ('**.a.beads.?', BEADS_OF_A),
        ('rings.?.extra.1', [f'rings.{ring}.extra.1' for ring in 'abc']),
    ],
)
def test_names(pattern, expected):
    assert units(ModuleNamePolicy([pattern]), Necklace()) == expected


def test_name_that_matches_nothing():
    with pytest.raises(PlanError, match="with parameters is named 'rings.a.beds.0'; did you mean 'rings.a.beads.0'"):
        ModuleNamePolicy(['rings.a.beads.*', 'rings.a.beds.0'])(Necklace())


def test_sizes():
    model = Necklace()
    numels = {name: sum(p.numel() for p in module.parameters()) for name, module in model.named_modules()}
    found = units(SizePolicy(1000, 6000), model)
    assert found and all(1000 <= numels[name] for name in found)
    assert 'rings.c.beads.1' in found and 'rings.c.beads.1.push' not in found
    assert not [name for name in found if name.startswith('rings.a.')]


def test_size_divides_what_is_too_large_and_takes_the_remainder():
    model = nn.Sequential(nn.Sequential(nn.Linear(10, 10, bias=False), nn.Sequential(nn.Linear(10, 30, bias=False))))
    assert units(SizePolicy(150, 300), model) == ['0.1']
    assert units(SizePolicy(100, 300), model) == ['0.0', '0.1']
    model[0].append(nn.Linear(9, 9))
    assert units(SizePolicy(150, 300), model) == ['0', '0.1']


def test_sizes_leave_heads_and_ties_alone():
    assert units(SizePolicy(50, 500), Bellows()) == ['east', 'north', 'south']
    assert units(SizePolicy(50, 500), Fan()) == ['folds.0', 'folds.1', 'folds.2']


def test_depth():
    assert units(DepthPolicy(1), Necklace()) == ['rings.a', 'rings.b', 'rings.c']
    found = units(DepthPolicy(2), Necklace())
    assert BEADS_OF_A[0] in found and 'rings.b.extra.0' in found
    assert units(DepthPolicy(1), Bellows()) == ['east', 'mouth', 'north', 'south']


NOTHING = [
    (SizePolicy(10**9), 'no module of Bellows that can be a unit has at least 1,000,000,000 parameters'),
    (DepthPolicy(9), 'no module of Bellows at this depth can be a unit'),
    (AllOf([DepthPolicy(1), ModuleNamePolicy(['north.push'])]), 'the policies have no unit in common'),
    (Not(DepthPolicy(1)), r'alone would make all else a unit; write AllOf\('),
    (build_policy(lambda module, recurse, nonwrapped_numel: recurse), 'it makes no module of Bellows a unit'),
]


@pytest.mark.parametrize(('policy', 'message'), NOTHING, ids=lambda value: str(value)[:20])
def test_policies_that_choose_nothing(policy, message):
    with pytest.raises(PlanError, match=message):
        policy(Bellows())


def test_combinations():
    model = Bellows()
    assert units(AnyOf([ModuleNamePolicy(['north']), ModuleNamePolicy(['mouth'])]), model) == ['mouth', 'north']
    both = AllOf([ModuleClassPolicy(['Pleat']), Not(ModuleNamePolicy(['choir.*', 'judge.**', 'east']))])
    assert units(both, model) == ['north', 'south']
    in_config = build_policy(['AutoPolicy', dict(type='ModuleNamePolicy', names=['mouth'])])
    assert units(in_config, model) == ['east', 'mouth', 'north', 'south']
    nested = dict(
        type='AllOf', policies=['AutoPolicy', dict(type='Not', policy=dict(type='ModuleNamePolicy', names=['east']))]
    )
    assert units(build_policy(nested), model) == ['north', 'south']


@pytest.mark.parametrize(
    ('cfg', 'message'),
    [
        (dict(type='SizePolicy', min_params=0), 'min_params: expected a positive integer; got 0'),
        (dict(type='SizePolicy', min_params=5, max_params=3), 'max_params: expected at least min_params, 5; got 3'),
        (dict(type='DepthPolicy', depth=True), 'depth: expected a positive integer; got True'),
        (dict(type='ModuleNamePolicy', names='a'), 'names: expected a list of patterns'),
        (dict(type='AnyOf', policies=[]), r'policies: expected a list of policies; got \[\]'),
        (dict(type='AllOf', policies=[dict(type='Not', policy='AutoPolicy')]), 'expected one that chooses'),
        ([dict(type='Not', policy='AutoPolicy')], 'Not takes away from others and belongs into AllOf'),
        (['AutoPolice'], "no wrap policy 'AutoPolice'; did you mean 'AutoPolicy'"),
        ('DepthPolicy', r"DepthPolicy needs depth; give a dict, such as dict\(type='DepthPolicy', depth=2\)"),
        (dict(type='size_based_auto_wrap_policy', min_parms=3), "no field 'min_parms'; did you mean 'min_num_params'"),
    ],
)
def test_refused(cfg, message):
    with pytest.raises(ValueError, match=message):
        build_policy(cfg)


def reference(model, policy):
    """What torch itself wraps: a marker in the place of FSDP."""

    class Marked(nn.Module):
        def __init__(self, module, **_):
            super().__init__()
            self.module = module

    names = {module: name for name, module in model.named_modules()}
    wrap._recursive_wrap(model, policy, Marked, set(), set(), only_wrap_children=True)
    return sorted(names[marked.module] for marked in model.modules() if isinstance(marked, Marked))


SIZE_BASED = dict(type='size_based_auto_wrap_policy', min_num_params=400)
WITH_PATH = dict(SIZE_BASED, type='torch.distributed.fsdp.wrap.size_based_auto_wrap_policy')


@pytest.mark.parametrize('cfg', [SIZE_BASED, WITH_PATH])
def test_torchs_size_policy_chooses_as_torch_does(cfg):
    policy = functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=400)
    found = units(build_policy(cfg), Necklace())
    assert len(found) > 3 and found == reference(Necklace(), policy)


@pytest.mark.parametrize(
    'cfg',
    [
        dict(type='transformer_auto_wrap_policy', transformer_layer_cls={Pleat}),
        dict(type='transformer_auto_wrap_policy', transformer_layer_cls=['tests.policies.strange.Pleat']),
        dict(type='ModuleWrapPolicy', module_classes=['tests.policies.strange.Pleat']),
        wrap.ModuleWrapPolicy({Pleat}),
        dict(type='lambda_auto_wrap_policy', lambda_fn=lambda module: isinstance(module, Pleat)),
        wrap.CustomPolicy(lambda module: isinstance(module, Pleat)),
    ],
    ids=['transformer', 'path', 'module', 'object', 'lambda', 'custom'],
)
def test_torchs_policies_by_class(cfg):
    """What no policy of torch's can know is passed over: the head and the experts of which one is picked."""
    plan = build_policy(cfg)(Bellows())
    assert sorted(unit.name for unit in plan.units[:-1]) == ['east', 'north', 'south']
    assert any(note.startswith('choir.0 is no unit: may be skipped') for note in plan.notes)


def test_function_of_a_project():
    @FUNCTIONS.register_module(name='wrap_pleats')
    def wrap_pleats(module: nn.Module, recurse: bool, nonwrapped_numel: int, least: int = 1) -> bool:
        return recurse or isinstance(module, Pleat) and nonwrapped_numel >= least

    try:
        assert units(build_policy('wrap_pleats'), Bellows()) == ['east', 'north', 'south']
        assert units(build_policy(dict(type='wrap_pleats', least=400)), Bellows()) == ['east', 'north', 'south']
        with pytest.raises(PlanError, match=r'wrap_pleats\(least=10000\): it makes no module'):
            build_policy(dict(type='wrap_pleats', least=10000))(Bellows())
    finally:
        del FUNCTIONS.module_dict['wrap_pleats']


def test_function_that_returns_no_plan():
    with pytest.raises(ValueError, match='returned a Tensor; expected a WrapPlan'):
        build_policy(lambda model: torch.zeros(()))(Bellows())
