"""The sweep on small models: what passes, what fails, and how that is called."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.models import TINY_DINO
from tests.tools.processes import ROOT, run

pytestmark = pytest.mark.distributed

TOOL = 'tools/analysis_tools/sweep_models.py'
# Name of the config to its model.
MODELS = {
    'dino': {**TINY_DINO, 'backbone': {**TINY_DINO['backbone'], 'with_cp': False}},
    'off': dict(type='OffBy2e5'),
    'dies': dict(type='Dies'),
    'needs_objects': dict(type='NeedsObjects'),
    'needs_large': dict(type='NeedsLargeImages'),
    'overflows': dict(type='Overflows'),
    'unknown': dict(type='NoSuchDetector'),
}
EXPECTED = {
    'dino': ('passed', ''),
    'off': ('failed', 'equal: first 2.0e-05 > 1.0e-06, loss 2.0e-05 > '),
    'dies': ('fails plainly', 'none-equal: RuntimeError: rank 0 ended with SIGSEGV'),
    'needs_objects': ('fails under DDP', 'ddp-empty: ValueError: an image without objects'),
    'needs_large': ('passed', ''),
    'overflows': ('fails plainly', 'none-equal: losses [inf, '),
    'unknown': ('fails plainly', "none-equal: KeyError: 'NoSuchDetector is not in the "),
}


def write(folder: Path, name: str, model: dict) -> Path:
    custom = "custom_imports = dict(imports=['tests.analysis.sweep.strange_models'])\n" if name != 'dino' else ''
    path = folder / f'{name}.py'
    path.write_text(f"default_scope = 'mmdet'\n{custom}model = {model!r}\n")
    return path


def swept(*words: Any) -> dict[str, dict]:
    """Run the tool, whose last argument is its folder; returns its results by name."""
    done = run(sys.executable, TOOL, *words)
    assert done.returncode == 0, done.stdout[-3000:]
    return {Path(entry['config']).stem: entry for entry in json.loads((words[-1] / 'results.json').read_text())}


def verdicts(folder: Path, *names: str) -> tuple[dict[str, dict], str]:
    """Sweep some of the models, and hold what is said of them against EXPECTED; returns the results and the table."""
    paths = [write(folder, name, MODELS[name]) for name in names]
    found = swept(*paths, '--sizes', 32, 64, '--out', folder / 'out')
    for name in names:
        status, reason = EXPECTED[name]
        assert found[name]['status'] == status, found[name]
        assert found[name]['reason'].startswith(reason), found[name]['reason']
    return found, (folder / 'out' / 'table.md').read_text()


@pytest.mark.slow
def test_verdicts(tmp_path: Path) -> None:
    _, table = verdicts(tmp_path, 'off', 'dies', 'unknown')
    assert '1 failed, 2 fails plainly' in table


@pytest.mark.slow
def test_all_verdicts(tmp_path: Path) -> None:
    found, table = verdicts(tmp_path, *MODELS)
    dino = found['dino']
    assert dino['units'] > 3 and dino['parameters'] > 1e5 and dino['size'] == 32 and dino['seconds'] > 0
    assert set(dino['equal']) == {'first', 'loss', 'norm'} and set(dino['different']) > {'grad', 'update', 'buffer'}
    assert found['needs_objects']['own'] and not found['needs_objects']['different']
    assert found['needs_large']['size'] == 64
    assert '2 passed, 1 failed, 1 fails under DDP, 3 fails plainly' in table


@pytest.mark.slow
def test_a_rank_that_hangs(tmp_path: Path) -> None:
    """Its own line is named, not torch's, and what comes after is still judged."""
    paths = [write(tmp_path, 'hangs', dict(type='Hangs')), write(tmp_path, 'dies', dict(type='Dies'))]
    found = swept(*paths, '--sizes', 32, '--seconds', 10, '--out', tmp_path / 'out')
    assert found['hangs']['status'] == 'failed' and found['dies']['status'] == 'fails plainly'
    reason = found['hangs']['reason']
    assert reason.startswith('zero3-equal: hung, or slow: not done after 10 s; rank 0 in ')
    assert 'strange_models.py' in reason.split('rank 1 in ')[1]


@pytest.mark.slow
def test_some_of_mmdet(tmp_path: Path) -> None:
    names = ['mmdet::retinanet/retinanet_r18_fpn_1x_coco.py', 'mmdet::yolox/yolox_tiny_8xb8-300e_coco.py']
    found = swept(*names, '--out', tmp_path / 'out')
    assert [entry['status'] for entry in found.values()] == ['passed', 'passed'], found


def test_the_tool_is_short() -> None:
    assert len((ROOT / TOOL).read_text().splitlines()) <= 150
