"""The table of a plan adds up and fits."""

from dataclasses import replace

import torch
from torch import nn

from mmzero.policies import Gathering, ModuleClassPolicy, make_plan, plan_figures, plan_table
from mmzero.policies.table import WIDTH
from mmzero.policies.unit import UnitRules


def table_of(plan, shard=1, **gathering):
    """The table of a plan on some ranks."""
    return plan_table(plan_figures(plan, Gathering(shard=shard, **gathering)))


def cells(table):
    """The rows, without header and rules, as lists of cells."""
    lines = table.splitlines()
    ends = [index for index, line in enumerate(lines) if line.startswith('---')]
    return [line.split() for line in lines[ends[0] + 1 : ends[1]]] + [lines[ends[1] + 1].split()]


def big(*sizes, dtype=torch.float32):
    """Square layers of whole MiB: 512 x 512 fp32 elements are 1 MiB."""
    layers = [nn.Linear(512, 512 * size, bias=False, dtype=dtype) for size in sizes]
    model = nn.Sequential(*layers).to('meta')
    model.extra = nn.Embedding(512, 512, device='meta')
    return model


def test_rows_times_alike_are_the_totals():
    *rows, root, total = cells(table_of(ModuleClassPolicy(['Linear'])(big(1, 1, 4, 1)), 2))
    # Not only neighbours are one row.
    assert [row[:3] for row in rows] == [['0,1,3', 'Linear', '3'], ['2', 'Linear', '1']]
    assert root[:2] == ['(root)', 'Sequential']
    assert total[:2] == ['total', '5']
    for column, whole in zip((3, 4, 5), total[2:5], strict=True):
        shown = [(int(row[2]), float(row[column].replace(',', ''))) for row in [*rows, root]]
        assert sum(alike * value for alike, value in shown) == float(whole.replace(',', ''))
    assert total[2:] == [f'{8 * 2**18:,}', '8.00', '4.00', '1.00']


def test_padding_is_told_with_what_to_do():
    plan = ModuleClassPolicy(['Linear'])(nn.Sequential(nn.Linear(2**18, 3, bias=False, device='meta')))
    table = table_of(plan, 2)
    row, root, total = cells(table)
    assert row[3:] == [f'{3 * 2**18:,}', '4.00', '2.00', '1.33', 'fp32']
    assert root[3:] == ['0', '0.00', '0.00', '1.00']
    assert total[-3:] == ['4.00', '2.00', '1.33']
    text = ' '.join(table.split())
    assert 'padding adds 33% to what ranks keep and gather, most in 0.weight (3 rows over 2 ranks)' in text
    assert 'mesh=dict(replicate=..., shard=...) (HSDP)' in text and 'shard_dim' in text
    assert 'padding adds' not in table_of(plan, 3)


def test_gathered_dtype_is_the_units_and_not_the_roots():
    plan = ModuleClassPolicy(['Linear'])(big(1, 4))
    table = table_of(plan, param_dtype=torch.bfloat16)
    *rows, root, total = cells(table)
    assert [(row[4], row[-1]) for row in rows] == [('0.50', 'bf16'), ('2.00', 'bf16')]
    assert root[4:] == ['1.00', '1.00', '1.00', 'fp32']
    assert total[-3:] == ['3.50', '6.00', '1.00']
    assert table.endswith('autocast keeps copies of its weights until backward, 0.50 MiB at most')
    assert 'autocast' not in table_of(plan)


def test_units_of_other_dtypes_are_not_alike():
    model = big(1, 1)
    model[1].to(torch.bfloat16)
    *rows, _, total = cells(table_of(ModuleClassPolicy(['Linear'])(model)))
    assert [(row[2], row[4]) for row in rows] == [('1', '1.00'), ('1', '0.50')]
    assert total[-3:] == ['2.50', '2.50', '1.00']


def test_rules_that_differ_are_told(net):
    plan = make_plan(net, ['blocks.0', 'blocks.1', 'stem'], 'test')
    rules = UnitRules(reshard_after_forward=False, param_dtype=torch.bfloat16)
    units = tuple(replace(unit, rules=rules) if 'blocks' in unit.name else unit for unit in plan.units)
    table = table_of(replace(plan, units=units), 2)
    assert '\nblocks.0-1: reshard_after_forward=False, param_dtype=torch.bfloat16\n' in table
    assert 'stem:' not in table
    units = (*plan.units[:-1], replace(plan.root, rules=UnitRules(shard=False)))
    assert '\n(root): shard=False\n' in table_of(replace(plan, units=units), 2)


def test_what_is_frozen_or_replicated_is_told(net):
    net.stem.requires_grad_(False)
    plan = make_plan(net, ['stem', 'head'], 'test')
    table = table_of(plan, 2)
    assert '\nfrozen, neither gradients nor optimizer state: stem\n' in table
    assert '\nreplicated, gradients averaged: 1 parameter (0-dim: nothing to split): scale\n' in table
    assert 'replicated' not in table_of(plan, 1)


def test_peak_says_how_it_is_meant():
    plan = ModuleClassPolicy(['Linear'])(big(1, 1, 1))
    assert 'peak of gathered parameters: 3.00 MiB (the root and the two largest consecutive units)' in table_of(plan)
    assert 'peak of gathered parameters: 4.00 MiB (units stay gathered' in table_of(plan, stays=True)


def test_long_names_are_cut_in_the_middle():
    inner = nn.Sequential(nn.Linear(1024, 2**20, device='meta'))
    model = nn.ModuleDict()
    part = model
    for name in ('a_backbone_of_a_long_name', 'transformer_encoder_part', 'layers_of_the_second_stage'):
        part[name] = nn.ModuleDict()
        part = part[name]
    part['attention_block_of_the_stage'] = inner
    type_name = type('DeformableDetrTransformerEncoderLayerOfMine', (nn.Sequential,), {})
    inner.__class__ = type_name
    plan = ModuleClassPolicy([type_name.__name__])(model)
    table = table_of(plan, 2**12)
    assert max(map(len, table.splitlines())) <= WIDTH
    assert cells(table)[0][0].startswith('a_back') and cells(table)[0][0].endswith('_of_the_stage')
