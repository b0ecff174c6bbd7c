"""The plan as a table that rank 0 prints at the start."""

from itertools import groupby

from mmzero.policies.plan import Unit, WrapPlan


def plan_table(plan: WrapPlan, shard_size: int, gathered_itemsize: int | None = None) -> str:
    """Draw a plan: one row per group of alike units, then the totals.

    Args:
        plan (WrapPlan): The plan.
        shard_size (int): Ranks that share the parameters.
        gathered_itemsize (int, optional): Bytes per element of the gathered units other than the root, where
            they are cast; the root's remainder is not. Defaults to None: as stored.

    Returns:
        str: The table; sizes in MiB, kept sizes with padding, per rank.
    """
    rows: list[tuple[str, ...]] = [('unit', 'class', 'alike', 'parameters', 'gathered MiB', 'kept MiB per rank')]
    units = list(plan.units[:-1])
    for _, group in groupby(units, key=lambda unit: (unit.class_name, unit.shapes, unit.itemsizes)):
        alike = list(group)
        rows.append(_row(alike[0].name, alike, shard_size, gathered_itemsize))
    rows.append(_row('(root)', [plan.root], shard_size, None))
    total = ('total', f'{len(plan.units)} unit' + 's' * (len(plan.units) > 1), '', f'{plan.numel:,}')
    gathered = sum(unit.gathered_bytes(gathered_itemsize) for unit in units) + plan.root.gathered_bytes()
    kept = sum(unit.kept_bytes(shard_size) for unit in plan.units)
    rows.append((*total, _mib(gathered), _mib(kept)))
    remainder = plan.root.numel * (gathered_itemsize or 0)
    note = (
        f'\n(root) is gathered as it is stored; autocast keeps copies of its weights until backward, {_mib(remainder)} '
        'MiB at most'
    )
    return _align(rows) + (note if gathered_itemsize else '')


def _row(name: str, alike: list[Unit], shard_size: int, itemsize: int | None) -> tuple[str, ...]:
    unit = alike[0]
    return (
        name,
        unit.class_name,
        str(len(alike)),
        f'{unit.numel:,}',
        _mib(unit.gathered_bytes(itemsize)),
        _mib(unit.kept_bytes(shard_size)),
    )


def _mib(size: int) -> str:
    return f'{size / 2**20:.2f}'


def _align(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append('  '.join(cells).rstrip())
    rule = '-' * max(map(len, lines))
    return '\n'.join([lines[0], rule, *lines[1:-1], rule, lines[-1]])
