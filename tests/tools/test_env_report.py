"""The tool that reports on the environment, with packages hidden, too."""

import json
import sys
import textwrap
from pathlib import Path

import pytest

from tests.tools.processes import ROOT, run, succeed

TOOL = ROOT / 'tools/env_report.py'

# Runs the tool where some packages cannot be imported.
HIDING = """
    import runpy, sys
    hidden = set(sys.argv.pop(1).split(','))
    class Hider:
        def find_spec(self, name, path=None, target=None):
            if name.split('.')[0] in hidden:
                raise ModuleNotFoundError(f'No module named {name!r}', name=name)
    sys.meta_path.insert(0, Hider())
    sys.argv = [sys.argv[1], '--json']
    runpy.run_path(sys.argv[0], run_name='__main__')
    assert not hidden & set(sys.modules), 'imported all the same'
"""


def report_without(*names: str) -> dict:
    text = succeed(sys.executable, '-c', textwrap.dedent(HIDING), ','.join(names), TOOL)
    return json.loads(text)


def works(report: dict) -> dict[str, bool]:
    return {part['name']: part['works'] for part in report['parts']}


def test_text() -> None:
    text = succeed(sys.executable, TOOL)
    assert 'yes mmzero itself' in text and 'Traceback' not in text and 'could not be looked at' not in text
    lines = text.splitlines()
    for title in ('Packages', 'Torch', 'GPUs', 'Limits', 'Disks', 'Network', 'What works here, and what is missing'):
        assert title in lines


@pytest.mark.parametrize(
    'hidden, part, remains',
    [
        (('torch',), 'mmzero itself, its tools and plans', None),
        (('mmengine',), 'training on CPUs, several ranks', None),
        pytest.param(('mmcv', 'mmdet'), "mmdet's one-stage detectors, DINO", 'bfloat16', marks=pytest.mark.slow),
        pytest.param(
            ('transformers', 'peft', 'safetensors', 'deepspeed'),
            'adapters (PEFT)',
            'torch.compile',
            marks=pytest.mark.slow,
        ),
        pytest.param(('packaging', 'numpy', 'cv2', 'pkg_resources'), 'DeepSpeed', None, marks=pytest.mark.slow),
    ],
)
def test_with_packages_hidden(hidden: tuple[str, ...], part: str, remains: str | None) -> None:
    report = report_without(*hidden)
    assert works(report)[part] is False or hidden[0] == 'packaging'
    assert remains is None or works(report)[remains]
    packages = report['facts']['packages']
    assert packages['pytest']['version'] is not None
    assert all(packages[name]['version'] is None for name in set(hidden) & packages.keys())


def test_with_nothing_but_python() -> None:
    """With every package hidden, the report still names what is missing, and what the machine has."""
    names = ('torch', 'mmengine', 'mmcv', 'mmdet', 'numpy', 'packaging', 'addict', 'yapf', 'setuptools', 'psutil')
    report = report_without(*names)
    core = report['parts'][0]
    assert not core['works'] and any('torch is missing: pip install' in line for line in core['missing'])
    assert report['facts']['packages']['pytest']['version'] is not None
    assert report['facts']['memory']['total'] > 0 and not any(works(report).values())


@pytest.mark.deepspeed
def test_deepspeeds_operators_are_asked_and_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('TORCH_EXTENSIONS_DIR', str(tmp_path / 'extensions'))
    report = json.loads(succeed(sys.executable, TOOL, '--json'))
    assert report['facts']['deepspeed']['cpu_adam'] == 'compatible'
    assert not (tmp_path / 'extensions').exists()


def test_unknown_options_are_refused() -> None:
    done = run(sys.executable, TOOL, '--nope')
    assert done.returncode == 2 and 'Traceback' not in done.stdout


def test_the_tool_is_short() -> None:
    assert len(TOOL.read_text().splitlines()) <= 150
