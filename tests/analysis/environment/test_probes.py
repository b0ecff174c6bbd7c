"""The probes: what they find, and what they keep to themselves."""

import os
from pathlib import Path

import pytest

from mmzero.analysis.environment import probe_all
from mmzero.analysis.environment.machine import probe_limits, probe_memory
from mmzero.analysis.environment.network import meant
from mmzero.analysis.environment.ops import locks_of, probe_builds
from mmzero.analysis.environment.packages import mmcv_ops, probe_packages, requirements
from mmzero.analysis.environment.places import kind_of, probe_places
from mmzero.analysis.environment.probing import safely
from mmzero.analysis.environment.tools import probe_compilers
from mmzero.analysis.environment.variables import told


def test_all_probes_find_something_here() -> None:
    facts = probe_all()
    assert [name for name, found in facts.items() if 'error' in found] == []
    assert facts['torch']['gloo'] is True and facts['torch']['initialised_cuda'] is False
    assert facts['mmengine']['Python']


def test_versions_are_held_against_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = requirements()
    assert wanted['torch'] == '>=2.11' and wanted['mmcv-lite'] == '>=2.0,<2.2' and wanted['deepspeed'] == '>=0.19'
    assert probe_packages()['torch']['fits'] is True
    monkeypatch.setattr('importlib.metadata.version', lambda name: '2.9.1+cu128')
    found = probe_packages()
    assert found['torch']['fits'] is False and found['mmengine']['fits'] is True and found['numpy']['fits'] is None


def test_without_setup_the_installed_package_says_what_it_wants(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr('mmzero.analysis.environment.packages.SETUP', tmp_path / 'setup.py')
    monkeypatch.setattr(
        'importlib.metadata.requires', lambda name: ['torch>=3', 'mmdet (>=4) ; extra == "det"', 'yapf']
    )
    assert requirements() == {'torch': '>=3', 'mmdet': '>=4', 'yapf': ''}


def test_what_stands_for_mmcvs_operators(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / 'mmcv').mkdir()
    (tmp_path / 'mmcv/__init__.py').write_text('raise RuntimeError("imported")')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__('sys').modules, 'mmcv', raising=False)
    assert mmcv_ops() == 'stand-in'
    (tmp_path / 'mmcv/_ext.cpython-311-x86_64-linux-gnu.so').touch()
    assert mmcv_ops() == 'compiled'


def test_locks_of_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / 'py311_cpu/cpu_adam/lock'
    lock.parent.mkdir(parents=True)
    assert locks_of(tmp_path) == []
    lock.touch()
    os.utime(lock, (lock.stat().st_mtime - 7200,) * 2)
    monkeypatch.setenv('TORCH_EXTENSIONS_DIR', str(tmp_path))
    assert probe_builds()['locks'] == [dict(path=str(lock), minutes=120)]


@pytest.mark.parametrize(
    'value, wanted',
    [
        ('eth', ['eth0', 'eth1']),
        ('=eth0', ['eth0']),
        ('^lo,docker', ['eth0', 'eth1', 'ib0']),
        ('^=eth0', ['lo', 'eth1', 'ib0', 'docker0']),
        ('ens', []),
    ],
)
def test_the_interfaces_that_nccl_takes(value: str, wanted: list[str]) -> None:
    names = ['lo', 'eth0', 'eth1', 'ib0', 'docker0']
    assert meant('NCCL_SOCKET_IFNAME', value, names) == wanted
    assert meant('GLOO_SOCKET_IFNAME', 'eth', names) == []
    assert meant('GLOO_SOCKET_IFNAME', 'eth0,ib0', names) == ['eth0', 'ib0']


def test_what_is_behind_a_file_system(tmp_path: Path) -> None:
    for name, rotates in (('sda', '1'), ('sdb', '0'), ('vda', '1')):
        (tmp_path / name / 'queue').mkdir(parents=True)
        (tmp_path / name / 'queue/rotational').write_text(f'{rotates}\n')
    devices = dict(
        rotating=('/dev/sda1', 'ext4'),
        solid=('/dev/sdb', 'xfs'),
        nvme=('/dev/nvme0n1p2', 'ext4'),
        network=('host:/home', 'nfs4'),
        virtual=('/dev/vda1', 'ext4'),
        unknown=('overlay', 'overlay'),
    )
    assert {kind: kind_of(*device, tmp_path) for kind, device in devices.items()} == {kind: kind for kind in devices}


def test_this_machines_figures_fit_each_other() -> None:
    places, memory, limits = probe_places(), probe_memory(), probe_limits()
    assert places['here']['path'] == os.getcwd() and 0 < places['here']['free'] <= places['here']['total']
    assert 0 < memory['available'] <= memory['total']
    assert limits['open_files'] is None or limits['open_files'] > 0


def test_a_compiler_is_found_by_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / 'my-c++'
    compiler.touch(mode=0o755)
    monkeypatch.setenv('CXX', f'{compiler} -O2')
    assert probe_compilers()['cxx'] == str(compiler)
    monkeypatch.delenv('CXX')
    monkeypatch.setenv('PATH', str(tmp_path))
    assert probe_compilers()['cxx'] is None


def test_no_secret_is_told() -> None:
    found = told(
        dict(
            RANK='1',
            NCCL_DEBUG='INFO',
            NCCL_AUTH_THING='x',
            TORCH_API_KEY='x',
            DS_TOKEN='x',
            HF_TOKEN='x',
            AWS_SECRET_ACCESS_KEY='x',
            SOMETHING='x',
            TORCH_HOME='https://user:word@host/models',
        )
    )
    assert found == dict(RANK='1', NCCL_DEBUG='INFO', TORCH_HOME='https://...@host/models')


def test_what_a_probe_raises_is_what_it_found() -> None:
    def leave() -> dict:
        raise SystemExit(3)

    assert safely(leave) == dict(error='SystemExit: 3')
    assert safely(lambda: dict(found=1 // 0)) == dict(error='ZeroDivisionError: integer division or modulo by zero')
