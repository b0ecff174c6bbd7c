"""tools/analysis_tools/measure_activations.py on a small detector."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import TINY_DINO

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_table_of_tiny_dino(tmp_path: Path) -> None:
    config = tmp_path / 'tiny.py'
    # Classes of the testing helpers' labels; sizes by which the encoder does not keep most of all.
    config.write_text(f"default_scope = 'mmdet'\nmodel = {TINY_DINO!r}\n")
    command = [
        sys.executable,
        'tools/analysis_tools/measure_activations.py',
        str(config),
        '--size',
        '64',
        '--rounds',
        '1',
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    rows = {cells[1]: cells for line in run.stdout.splitlines() if (cells := re.split(r' *\| *', line))[0] == ''}
    kept = {name: float(cells[3]) for name, cells in rows.items() if re.fullmatch(r'[\d.]+', cells[3])}
    assert list(kept) == [
        'none',
        'backbone',
        'backbone + encoder',
        'backbone + encoder + decoder',
        'all, matmuls kept',
        'all, inputs offloaded',
        'none, all offloaded',
        'Budget at half',
    ]
    none, backbone, encoder, everything, matmuls, offloaded, _, budget = kept.values()
    assert none > backbone > encoder > everything >= offloaded
    assert everything < matmuls < none
    assert budget <= none / 2
    assert float(rows['none'][6]) == 0 < float(rows['backbone'][6])
