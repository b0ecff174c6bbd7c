"""What the ranks of a node hold until a model can be trained."""

import subprocess
import sys
from pathlib import Path

import pytest

from mmzero.analysis.start.measure import Start, measure_starts, starts_table
from mmzero.analysis.start.memory import PeakOf, private_bytes
from mmzero.errors import ConfigError, ZeroError

HOLDS = """
import mmap, sys
print('ready', flush=True)
sys.stdin.readline()
held = bytearray(32 * 2**20)
with open(sys.argv[1], 'rb') as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    sum(mapped[::4096])
del held
print('done', flush=True)
sys.stdin.readline()
"""


def test_what_a_process_held_for_a_moment_is_seen_and_a_mapped_file_is_not(tmp_path: Path) -> None:
    (tmp_path / 'file').write_bytes(bytes(64 * 2**20))
    command = [sys.executable, '-c', HOLDS, str(tmp_path / 'file')]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        with PeakOf([process.pid, process.pid]) as peak:
            process.stdin.write('\n')
            process.stdin.flush()
            process.stdout.readline()
        process.communicate('\n')
        assert private_bytes(process.pid) == 0
    # Twice, since it was asked for twice.
    assert 2 * 32 * 2**20 <= peak.bytes < 2 * 48 * 2**20
    assert peak.samples > 1


def test_a_config_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'nope\.py: no such config file'):
        measure_starts(str(tmp_path / 'nope.py'), 2, tmp_path / 'out')
    assert not (tmp_path / 'out').exists()


@pytest.mark.slow
def test_a_process_that_fails_is_told_with_its_last_line_and_its_log(tmp_path: Path) -> None:
    (tmp_path / 'bad.py').write_text("model = dict(type='mmengine.NoSuchModel')")
    with pytest.raises(ZeroError, match=r'the weights could not be written: .*NoSuchModel.*; its log is .*write\.log'):
        measure_starts(str(tmp_path / 'bad.py'), 2, tmp_path)


def test_table() -> None:
    random = dict(mmzero=Start(130, 100, 9), stock=Start(810, 100, 9))
    found = dict(random=random, sharded=dict(mmzero=Start(115, 100, 9)))
    assert starts_table(found).splitlines()[2:] == ['| random | 1.30 | 8.10 |', '| sharded | 1.15 |  |']


@pytest.mark.slow
def test_a_node_holds_about_one_model(tmp_path: Path) -> None:
    """The model's own layers, on 4 ranks that each would hold it whole."""
    found = measure_starts('configs/dino_swin_l_zero3.py', 4, tmp_path)
    print(starts_table(found))
    for source, starts in found.items():
        assert starts['mmzero'].models < 1.6, source
    for source in ('random', 'init_cfg', 'pth'):
        assert found[source]['stock'].models > 4, source
