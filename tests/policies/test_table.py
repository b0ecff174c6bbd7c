"""The table of a plan adds up."""

import torch
from torch import nn

from mmzero.policies import ModuleClassPolicy, plan_table


def cells(table):
    """The rows, without header and rules, as lists of cells."""
    lines = [line for line in table.splitlines()[1:] if not line.startswith(('-', '(root) is'))]
    return [line.split() for line in lines]


def big(*sizes, dtype=torch.float32):
    """Square layers of whole MiB: 512 x 512 fp32 elements are 1 MiB."""
    layers = [nn.Linear(512, 512 * size, bias=False, dtype=dtype) for size in sizes]
    model = nn.Sequential(*layers).to('meta')
    model.extra = nn.Embedding(512, 512, device='meta')
    return model


def test_rows_times_alike_are_the_totals():
    model = big(1, 1, 4, 1)
    table = plan_table(ModuleClassPolicy(['Linear'])(model), shard_size=2)
    *rows, root, total = cells(table)
    assert [row[:3] for row in rows] == [
        ['0', 'Linear', '2'],
        ['2', 'Linear', '1'],
        ['3', 'Linear', '1'],
    ]
    assert root[:2] == ['(root)', 'Sequential']
    assert total[:3] == ['total', '5', 'units']
    for column, whole in zip((3, 4, 5), total[3:], strict=True):
        shown = [(int(row[2]), float(row[column].replace(',', ''))) for row in [*rows, root]]
        assert sum(alike * value for alike, value in shown) == float(whole.replace(',', ''))
    assert total[3:] == [f'{8 * 2**18:,}', '8.00', '4.00']


def test_kept_sizes_are_padded():
    model = nn.Sequential(nn.Linear(2**18, 3, bias=False, device='meta'))
    row, root, total = cells(plan_table(ModuleClassPolicy(['Linear'])(model), shard_size=2))
    assert row[3:] == [f'{3 * 2**18:,}', '3.00', '2.00']
    assert root[3:] == ['0', '0.00', '0.00']
    assert total[-2:] == ['3.00', '2.00']


def test_gathered_dtype_is_the_units_and_not_the_roots():
    plan = ModuleClassPolicy(['Linear'])(big(1, 4))
    table = plan_table(plan, 1, gathered_itemsize=2)
    *rows, root, total = cells(table)
    assert [row[4] for row in rows] == ['0.50', '2.00']
    assert root[4:] == ['1.00', '1.00']
    assert total[-2:] == ['3.50', '6.00']
    assert table.endswith('autocast keeps copies of its weights until backward, 0.50 MiB at most')
    assert 'autocast' not in plan_table(plan, 1)


def test_units_of_other_dtypes_are_not_alike():
    model = big(1, 1)
    model[1].to(torch.bfloat16)
    *rows, _, total = cells(plan_table(ModuleClassPolicy(['Linear'])(model), 1))
    assert [(row[2], row[4]) for row in rows] == [('1', '1.00'), ('1', '0.50')]
    assert total[-2:] == ['2.50', '2.50']
