"""The plan as a table."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields

from mmzero.policies.figures import PlanFigures, UnitFigures, most_padded, replicated
from mmzero.policies.groups import alike, common_name
from mmzero.policies.unit import UnitRules

WIDTH = 120
"""Columns that a table has at most."""

PADDING_WORTH_A_LINE = 1.05

_HEADER = ('unit', 'class', 'alike', 'parameters', 'gathered', 'kept', 'padding', 'dtype')
_LEFT = (0, 1, 7)

SHORT = dict(float32='fp32', bfloat16='bf16', float16='fp16')
"""Names of dtypes in tables."""


def plan_table(figures: PlanFigures) -> str:
    """Draw a plan: a row per group of alike units, the totals, then what a row has no room for.

    Args:
        figures (PlanFigures): The plan and its bytes.

    Returns:
        str: At most 120 columns; sizes in MiB on one rank, with padding.
    """
    rows: list[tuple[str, ...]] = [_HEADER]
    rows += [_row(common_name([item.unit.name for item in group]), group) for group in alike(figures.units[:-1])]
    rows.append(_row('(root)', [figures.root]))
    rows.append(_total(figures))
    return '\n'.join([*align(_fit(rows), _LEFT, rules=(1, len(rows) - 1)), *_remarks(figures)])


def _row(name: str, group: Sequence[UnitFigures]) -> tuple[str, ...]:
    item = group[0]
    numel, padding = f'{item.unit.numel:,}', f'{item.padding:.2f}'
    sizes = mib(item.gathered_bytes), mib(item.kept_bytes)
    return (
        name,
        item.unit.class_name,
        str(len(group)),
        numel,
        *sizes,
        padding,
        '+'.join(SHORT.get(name, name) for name in item.dtypes),
    )


def _total(figures: PlanFigures) -> tuple[str, ...]:
    count = len(figures.units)
    sizes = mib(figures.gathered_bytes), mib(figures.kept_bytes)
    return '', 'total', str(count), f'{figures.plan.numel:,}', *sizes, f'{figures.padding:.2f}', ''


def _remarks(figures: PlanFigures) -> Iterator[str]:
    """Lines below the table, wrapped."""
    lines = ['gathered and kept: MiB on a rank, with padding', *_rules(figures), *_frozen(figures)]
    lines += [*_padding(figures), *_replicated(figures), _peak(figures)]
    remainder = figures.gathering.param_dtype
    if remainder is not None and figures.root.split_numel:
        most = mib(figures.root.split_numel * remainder.itemsize)
        lines.append(
            '(root) is gathered as it is stored; autocast keeps copies of its weights until backward, '
            f'{most} MiB at most'
        )
    for line in lines:
        yield from wrap(line)


def _rules(figures: PlanFigures) -> Iterator[str]:
    for group in alike(figures.units):
        rules = rules_text(group[0].unit.rules)
        if rules:
            yield f'{common_name([item.unit.name for item in group]) or "(root)"}: {rules}'


def _frozen(figures: PlanFigures) -> Iterator[str]:
    frozen = [item for item in figures.units if item.unit.params and not any(item.unit.trainable)]
    names = [common_name([item.unit.name for item in group]) or '(root)' for group in alike(frozen)]
    if names:
        yield f'frozen, neither gradients nor optimizer state: {", ".join(names)}'


def rules_text(rules: UnitRules) -> str:
    """Say how a unit differs.

    Args:
        rules (UnitRules): Its rules.

    Returns:
        str: The fields that differ from the defaults; empty where none does.
    """
    default = UnitRules()
    return ', '.join(
        f'{field.name}={getattr(rules, field.name)}'
        for field in fields(rules)
        if getattr(rules, field.name) != getattr(default, field.name)
    )


def _padding(figures: PlanFigures) -> Iterator[str]:
    worst = most_padded(figures.units)
    if worst is not None and figures.padding > PADDING_WORTH_A_LINE:
        name, rows, ranks = worst
        yield (
            f'padding adds {figures.padding - 1:.0%} to what ranks keep and gather, most in {name} ({rows} rows over '
            f'{ranks} ranks): shard over fewer ranks, mesh=dict(replicate=..., shard=...) (HSDP), or along another '
            'dimension, shard_dim in overrides'
        )


def _replicated(figures: PlanFigures) -> Iterator[str]:
    if figures.gathering.shard == 1:
        return
    for item in replicated(figures.plan):
        shown = ', '.join(item.params[:3]) + (', ...' if len(item.params) > 3 else '')
        count = len(item.params)
        noun = 'parameter' if count == 1 else 'parameters'
        yield f'replicated, gradients averaged: {count} {noun} ({item.reason}): {shown}'


def _peak(figures: PlanFigures) -> str:
    most = f'peak of gathered parameters: {mib(figures.peak_gathered_bytes)} MiB'
    if figures.gathering.stays:
        return f'{most} (units stay gathered from forward to backward)'
    return f'{most} (the root and the two largest consecutive units)'


def wrap(line: str) -> list[str]:
    """Break a line at the width of a table; what follows is indented.

    Args:
        line (str): The line.

    Returns:
        list[str]: Its parts.
    """
    return textwrap.wrap(line, WIDTH, subsequent_indent='    ', break_on_hyphens=False)


def mib(size: float) -> str:
    """Write a number of bytes in MiB.

    Args:
        size (float): Bytes.

    Returns:
        str: With two digits after the point.
    """
    return f'{size / 2**20:,.2f}'


def align(rows: Sequence[tuple[str, ...]], left: Sequence[int], rules: Sequence[int]) -> list[str]:
    """Lay out rows in columns.

    Args:
        rows (Sequence[tuple[str, ...]]): The cells.
        left (Sequence[int]): Columns that are flush left; others are flush right.
        rules (Sequence[int]): Rows above which a line is drawn.

    Returns:
        list[str]: The lines.
    """
    widths = _widths(rows)
    lines = [
        '  '.join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    rule = '-' * max(map(len, lines))
    return [line for index, text in enumerate(lines) for line in ([rule, text] if index in rules else [text])]


def _widths(rows: Sequence[tuple[str, ...]]) -> list[int]:
    return [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]


def _fit(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Shorten the names of units and classes, the longer of the two columns first, until rows fit."""
    widths = _widths(rows)
    excess = sum(widths) + 2 * (len(widths) - 1) - WIDTH
    while excess > 0:
        widths[0 if widths[0] >= widths[1] else 1] -= 1
        excess -= 1
    return [(_cut(row[0], widths[0]), _cut(row[1], widths[1]), *row[2:]) for row in rows]


def _cut(text: str, width: int) -> str:
    """Leave out the middle, since the ends of paths tell most."""
    if len(text) <= width:
        return text
    head = (width - 3) // 3
    return f'{text[:head]}...{text[len(text) - (width - 3 - head) :]}'
