"""Running cases in a process of its own, so that a hang or a crash is one case's verdict."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tests.tools.processes import ROOT, environment


def run_cases(seeds: Sequence[int], digits: str) -> Iterator[dict[str, Any]]:
    """Run cases one after another; a new process goes on where one died.

    Args:
        seeds (Sequence[int]): The cases.
        digits (str): Path of the digits data set.

    Yields:
        dict: A verdict, as tests.fuzz.case.Verdict.
    """
    left = list(seeds)
    while left:
        words = [sys.executable, '-m', 'tests.fuzz.worker', digits, *map(str, left)]
        process = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True)
        for line in process.stdout.splitlines():
            yield json.loads(line)
            left.pop(0)
        if left:
            text = process.stderr[-3000:]
            yield dict(seed=left.pop(0), kind='?', base='?', what=[], outcome='hung or died', text=text, ok=False)


def table(verdicts: Sequence[dict[str, Any]]) -> str:
    """Count verdicts by kind of mutation.

    Args:
        verdicts (Sequence[dict]): The verdicts.

    Returns:
        str: A table of kinds and outcomes.
    """
    outcomes = sorted({verdict['outcome'].split(' of ')[0] for verdict in verdicts})
    lines = [f'{"mutation":16}' + ''.join(f'{name:>16}' for name in (*outcomes, 'right'))]
    for kind in sorted({verdict['kind'] for verdict in verdicts}):
        rows = [verdict for verdict in verdicts if verdict['kind'] == kind]
        counts = [sum(row['outcome'].split(' of ')[0] == name for row in rows) for name in outcomes]
        right = f'{sum(row["ok"] for row in rows)} of {len(rows)}'
        lines.append(f'{kind:16}' + ''.join(f'{count:>16}' for count in (*counts, right)))
    return '\n'.join(lines)
