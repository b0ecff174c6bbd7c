"""The sweep on small models: what passes, what fails and how that is called; a second start goes on."""

import json
import sys
from pathlib import Path

import pytest

from tests.models import TINY_DINO
from tests.tools.processes import ROOT, run

pytestmark = pytest.mark.distributed

TOOL = 'tools/analysis_tools/sweep_models.py'
CUSTOM = "default_scope = 'mmdet'\ncustom_imports = dict(imports=['tests.analysis.sweep.strange_models'])\n"
# Name of the config to its model.
MODELS = {
    'dino': {**TINY_DINO, 'backbone': {**TINY_DINO['backbone'], 'with_cp': False}},
    'off': dict(type='OffBy2e5'),
    'hangs': dict(type='Hangs'),
    'dies': dict(type='Dies'),
    'needs_objects': dict(type='NeedsObjects'),
    'needs_large': dict(type='NeedsLargeImages'),
    'overflows': dict(type='Overflows'),
    'unknown': dict(type='NoSuchDetector'),
}
EXPECTED = {
    'dino': ('passed', ''),
    'off': ('failed', 'equal: first 2.0e-05 > 1.0e-06, loss 2.0e-05 > '),
    'hangs': ('failed', 'zero3-equal: hung for 15 s: rank 0 in '),
    'dies': ('fails plainly', 'none-equal: RuntimeError: rank 0 ended with SIGSEGV'),
    'needs_objects': ('fails under DDP', 'ddp-empty: ValueError: an image without objects'),
    'needs_large': ('passed', ''),
    'overflows': ('fails plainly', 'none-equal: losses [inf, '),
    'unknown': ('fails plainly', "none-equal: KeyError: 'NoSuchDetector is not in the "),
}


@pytest.fixture
def configs(tmp_path: Path) -> dict[str, str]:
    for name, model in MODELS.items():
        text = CUSTOM if name != 'dino' else "default_scope = 'mmdet'\n"
        (tmp_path / f'{name}.py').write_text(f'{text}model = {model!r}\n')
    return {name: str(tmp_path / f'{name}.py') for name in MODELS}


def test_verdicts(configs: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / 'out'
    options = ('--sizes', 32, 64, '--seconds', 15, '--out', out)
    done = run(sys.executable, TOOL, *configs.values(), *options)
    assert done.returncode == 0, done.stdout[-3000:]
    found = {Path(entry['config']).stem: entry for entry in json.loads((out / 'results.json').read_text())}
    assert {name: entry['status'] for name, entry in found.items()} == {
        name: status for name, (status, _) in EXPECTED.items()
    }
    for name, (_, reason) in EXPECTED.items():
        assert found[name]['reason'].startswith(reason), found[name]['reason']
    dino = found['dino']
    assert dino['units'] > 3 and dino['parameters'] > 1e5 and dino['size'] == 32 and dino['seconds'] > 0
    assert set(dino['equal']) == {'first', 'loss', 'norm'} and set(dino['different']) > {'grad', 'update', 'buffer'}
    # Where a rank hangs, its own line is named, not torch's.
    assert 'strange_models.py' in found['hangs']['reason'].split('rank 1 in ')[1]
    assert found['needs_objects']['own'] and not found['needs_objects']['different']
    assert found['needs_large']['size'] == 64
    assert '2 passed, 2 failed, 1 fails under DDP, 3 fails plainly' in (out / 'table.md').read_text()
    # A second start has nothing to do, but to try again what failed under the pair.
    before = (out / 'results.jsonl').read_text()
    done = run(sys.executable, TOOL, configs['dino'], configs['dies'], *options, '--retry', 'failed')
    assert done.returncode == 0 and (out / 'results.jsonl').read_text() == before
    assert '1 passed, 1 fails plainly' in done.stdout


def test_the_tool_is_short() -> None:
    assert len((ROOT / TOOL).read_text().splitlines()) <= 150
