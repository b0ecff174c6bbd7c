"""Swap folders go with their process, and stale locks of builds are told."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.file_baton import FileBaton

from mmzero.engines.deepspeed.build_lock import check_build_locks
from mmzero.engines.deepspeed.swap import PREFIX, SwapFolder
from mmzero.errors import ConfigError

END = """
import sys
from mmzero.engines.deepspeed.swap import SwapFolder
print(SwapFolder(sys.argv[1]).path.exists())
"""
# A process with what is imported here; atexit does not run in it.
FORK = multiprocessing.get_context('fork')


def folders(root: Path) -> list[str]:
    return [path.name for path in root.glob(f'{PREFIX}*')]


def hold(root: str, there: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    folder = SwapFolder(root)
    (folder.path / 'params.swp').write_bytes(b'x' * 1000)
    there.send(True)
    time.sleep(600)


def started(root: Path) -> Any:
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=hold, args=(str(root), theirs), daemon=True)
    process.start()
    assert ours.poll(60) and ours.recv()
    return process


def test_it_goes_by_sigterm(tmp_path: Path) -> None:
    process = started(tmp_path)
    assert len(folders(tmp_path)) == 1
    process.terminate()
    process.join(60)
    assert process.exitcode == -signal.SIGTERM and folders(tmp_path) == []


@pytest.mark.slow
def test_it_goes_at_the_end(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, '-c', END, str(tmp_path)], check=True, capture_output=True, text=True)
    assert ended.stdout == 'True\n' and folders(tmp_path) == []


def test_the_next_start_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    killed, living = started(tmp_path), started(tmp_path)
    before = folders(tmp_path)
    killed.kill()
    killed.join(60)
    assert len(before) == 2 and set(folders(tmp_path)) == set(before)
    own = SwapFolder(str(tmp_path))
    # The one that lives keeps its own.
    assert len(folders(tmp_path)) == 2 and own.path.name in folders(tmp_path)
    own.remove()
    living.kill()
    living.join(60)


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / 'file').write_text('')
    with pytest.raises(ConfigError, match=r'offload.nvme_path: got .*file.*; give a folder on a local disk'):
        SwapFolder(str(tmp_path / 'file'))


def test_a_lock_that_nobody_holds_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('TORCH_EXTENSIONS_DIR', str(tmp_path))
    check_build_locks(['async_io'])
    (tmp_path / 'async_io').mkdir()
    lock = tmp_path / 'async_io' / 'lock'
    baton = FileBaton(str(lock))
    assert baton.try_acquire()
    # A build that goes on.
    check_build_locks(['async_io'])
    assert baton.fd is not None
    os.close(baton.fd)
    with pytest.raises(ConfigError, match=r'async_io/lock: is left of a build of DeepSpeed that was killed'):
        check_build_locks(['cpu_adam', 'async_io'])
    lock.unlink()
    check_build_locks(['async_io'])
