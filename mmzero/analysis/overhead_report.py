"""The overhead as a table and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mmzero.analysis.contestants import HANDS, PAIR
from mmzero.analysis.overhead import Overhead

LIMIT = 1.05
"""What the upper end of the interval against the loop by hand is held against."""


def overhead_table(found: Overhead) -> str:
    """Lay out what was measured.

    Args:
        found (Overhead): One setting's.

    Returns:
        str: A heading, a row per contestant, and what follows from them.
    """
    rows = [('contestant', 'pair / it', '95% interval', 'pairs', 'collectives', 'moved', 'syncs', 'calls', 'ms')]
    for name, cost in found.costs.items():
        ratio = cost.ratio
        interval = '' if name == PAIR else f'{ratio.low:.3f} to {ratio.high:.3f}'
        rows.append(
            (
                name,
                f'{ratio.median:.3f}',
                interval,
                str(ratio.pairs),
                ', '.join(f'{number} {kind}' for kind, number in cost.collectives.items()) or 'none',
                f'{cost.moved:,.0f}',
                str(sum(cost.syncs.values())),
                f'{cost.python_calls:,}',
                f'{1000 * cost.seconds:.1f}',
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ['  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, '-' * max(map(len, lines)))
    return '\n'.join([_heading(found), *lines, *_conclusion(found)])


def _heading(found: Overhead) -> str:
    about = found.setting
    return (
        f'\nZeRO stage {about["stage"]} on {about["engine"]}, {about["dtype"]}, {about["accumulation"]} '
        f'micro-batch(es) of {about["batch_size"]} per step, {about["ranks"]} ranks on {about["device"]} '
        f'({about["backend"]}); {about["model"]}, {about["parameters"]:,} parameters. Per optimizer step and '
        'rank; calls are of Python functions:'
    )


def _conclusion(found: Overhead) -> list[str]:
    if found.faults:
        return [f'FAULT {fault}' for fault in found.faults]
    high = found.costs[HANDS[found.setting['engine']]].ratio.high
    verdict = 'within' if high <= LIMIT else 'NOT within'
    return [
        'The pair and the loop by hand are equal in collectives, elements moved and device syncs, and losses within '
        f'{found.costs[HANDS[found.setting["engine"]]].loss_difference:.0e}.',
        f'The upper end of the interval against the loop by hand, {high:.3f}, is {verdict} {LIMIT}.',
    ]


def write_json(found: Sequence[Overhead], path: Path) -> None:
    """Write what was measured.

    Args:
        found (Sequence[Overhead]): Setting by setting.
        path (Path): The file; folders are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(item) for item in found], indent=2) + '\n')
