"""The wrap plan divides the parameters, each into one unit."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from mmzero.errors import PlanError
from mmzero.policies import (
    AutoPolicy,
    DepthPolicy,
    ModuleClassPolicy,
    ModuleNamePolicy,
    SizePolicy,
    Unit,
    build_policy,
    make_plan,
)
from tests.models import Block


def names_of(plan):
    """Names of the units, in order."""
    return [unit.name for unit in plan.units]


def unit(*shapes, itemsize=4):
    """A unit of parameters of these shapes."""
    names = tuple(str(i) for i in range(len(shapes)))
    return Unit('u', 'U', names, shapes, (itemsize,) * len(shapes), (True,) * len(shapes), tuple(range(len(shapes))))


@pytest.mark.parametrize(
    'names',
    [[], ['blocks.0'], ['blocks', 'blocks.1', 'blocks.1.inner'], ['stem', 'head', 'blocks.2.up']],
)
def test_units_are_disjoint_and_cover_the_model(net, names):
    plan = make_plan(net, names, 'test')
    params = [name for unit in plan.units for name in unit.params]
    assert sorted(params) == sorted(name for name, _ in net.named_parameters())
    assert plan.numel == sum(param.numel() for param in net.parameters())


def test_unit_leaves_out_what_inner_units_hold(net):
    plan = make_plan(net, ['blocks.0', 'blocks.0.inner'], 'test')
    inner, outer, root = plan.units
    assert inner.params == tuple(f'blocks.0.inner.{name}' for name in ('0.weight', '0.bias', '1.weight', '1.bias'))
    assert outer.params == ('blocks.0.up.weight', 'blocks.0.up.bias')
    assert not set(root.params) & {*inner.params, *outer.params}


def test_innermost_first_and_root_last(net):
    plan = make_plan(net, ['blocks', 'stem', 'blocks.1', 'blocks.0', 'blocks.1.inner'], 'test')
    # `blocks` keeps only what no block holds: the third block.
    assert names_of(plan) == ['blocks.1.inner', 'blocks.0', 'blocks.1', 'stem', 'blocks', '']
    assert plan.root.name == ''
    assert plan.root.class_name == 'Net'
    assert 'scale' in plan.root.params


def test_unit_without_parameters_of_its_own_is_left_out(net):
    plan = make_plan(net, ['blocks', 'blocks.0', 'blocks.1', 'blocks.2'], 'test')
    assert names_of(plan) == ['blocks.0', 'blocks.1', 'blocks.2', '']


def test_root_remains_when_units_hold_everything():
    plan = make_plan(nn.Sequential(nn.Linear(2, 2)), ['0'], 'test')
    assert names_of(plan) == ['0', '']
    assert plan.root.params == ()


def test_name_that_is_a_prefix_of_another_is_not_its_parent():
    model = nn.ModuleDict(dict(a=nn.Linear(1, 1), ab=nn.Linear(1, 1)))
    plan = make_plan(model, ['a'], 'test')
    assert plan.units[0].params == ('a.weight', 'a.bias')


def test_tied_across_units_is_refused_with_both_paths(net):
    net.blocks[1].up.weight = net.blocks[0].up.weight
    message = (
        'test: blocks.0.up.weight and blocks.1.up.weight are one tied parameter, '
        "but lie in the units 'blocks.0' and 'blocks.1'; leave one"
    )
    with pytest.raises(PlanError, match=message):
        make_plan(net, ['blocks.0', 'blocks.1'], 'test')


def test_tied_to_the_root_is_refused(net):
    net.blocks[0].up.weight = net.tied = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(PlanError, match="tied and blocks.0.up.weight .* 'root' and 'blocks.0'"):
        make_plan(net, ['blocks.0'], 'test')


@pytest.mark.parametrize('names', [[], ['blocks']])
def test_tied_within_a_unit_counts_once(net, names):
    numel = sum(param.numel() for param in net.parameters())
    net.blocks[1].up.weight = net.blocks[0].up.weight
    plan = make_plan(net, names, 'test')
    assert plan.numel == numel - 16
    params = [name for unit in plan.units for name in unit.params]
    assert 'blocks.0.up.weight' in params
    assert 'blocks.1.up.weight' not in params


def test_path_that_is_not_in_the_model(net):
    with pytest.raises(PlanError, match="test: 'blocks.3' is not a module of Net"):
        make_plan(net, ['blocks.0', 'blocks.3'], 'test')


def test_model_on_meta_gives_the_same_plan(net):
    names = ['blocks.0', 'blocks.1']
    real = make_plan(net, names, 'test')
    assert make_plan(net.to('meta'), names, 'test') == real


@pytest.mark.parametrize(
    ('shape', 'shard_size', 'elements'),
    [
        ((8, 3), 4, 6),  # 2 rows each
        ((9, 3), 4, 9),  # 3 rows each, 3 of 12 are padding
        ((3, 5), 4, 5),  # one row each, the last rank has none
        ((1,), 8, 1),
        ((7,), 1, 7),
        ((), 8, 1),  # whole on every rank
        ((0, 5), 4, 0),
    ],
)
def test_kept_bytes_are_padded_rows(shape, shard_size, elements):
    assert unit(shape).kept_bytes(shard_size) == 4 * elements
    assert unit(shape, itemsize=2).kept_bytes(shard_size) == 2 * elements


def test_kept_bytes_are_what_dtensor_keeps():
    for rows, ranks in [(9, 4), (3, 4), (10, 3), (8, 8)]:
        largest = len(torch.arange(rows).chunk(ranks)[0])
        assert unit((rows, 2)).kept_bytes(ranks) == largest * 2 * 4


def test_bytes_are_sums_over_parameters(net):
    net.head.to(torch.bfloat16)
    root = make_plan(net, [], 'test').root
    elements = 16 + 3 * 48 + 1
    assert root.numel == elements + 10
    assert root.gathered_bytes() == 4 * elements + 2 * 10
    assert root.gathered_bytes(itemsize=2) == 2 * (elements + 10)
    assert root.kept_bytes(1) == root.gathered_bytes()


def test_policies_need_no_process_group():
    # Its own interpreter: other tests have joined groups in this one.
    code = (
        'import torch.distributed as dist\n'
        'import mmzero.policies\n'
        'from torch import nn\n'
        "policy = mmzero.policies.ModuleClassPolicy(['Linear'])\n"
        'assert len(policy(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))).units) == 3\n'
        'assert not dist.is_initialized()\n'
    )
    subprocess.run([sys.executable, '-c', code], check=True)


class Twice(nn.Module):
    """A net that is registered under two names, and a block that stands in a list three times."""

    def __init__(self):
        super().__init__()
        self.student = nn.ModuleList(Block(4, False) for _ in range(2))
        self.other = self.student
        self.same = nn.ModuleList([Block(4, False)] * 3)


@pytest.mark.parametrize(
    'policy',
    [
        ModuleClassPolicy(['Block']),
        ModuleNamePolicy(['student.*', 'same.*']),
        SizePolicy(1, 1000),
        DepthPolicy(1),
        build_policy(dict(type='transformer_auto_wrap_policy', transformer_layer_cls=[Block])),
    ],
)
def test_a_module_of_several_names_is_one_unit(policy):
    plan = policy(Twice())
    assert sorted(unit.name for unit in plan.units if unit.params) == ['same.0', 'student.0', 'student.1']
    assert plan.numel == sum(param.numel() for param in Twice().parameters())


def test_blocks_of_several_names_are_found():
    names = {unit.name for unit in AutoPolicy()(Twice()).units}
    assert {'student.0', 'student.1'} <= names
