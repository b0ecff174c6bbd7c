"""How a tool's process ends."""

import subprocess
import sys
from pathlib import Path

from tests.tools.processes import environment

TOOL = """
import atexit
import os
import threading
import time
import torch.distributed as dist
from mmzero.engines import init_process_group
from mmzero.runner import run_tool


class Witness:
    def __del__(self):
        os.write(1, b'finalized')


def write_late():
    time.sleep(0.5)
    print('thread done')


witness = Witness()


def main():
    if {with_group}:
        init_process_group('pytorch')
    atexit.register(print, 'exit handler')
    threading.Thread(target=write_late).start()
    print('main done')


run_tool(main)
print('group', dist.is_initialized())
"""


def lines(tmp_path: Path, with_group: bool) -> list[str]:
    script = tmp_path / 'tool.py'
    script.write_text(TOOL.format(with_group=with_group))
    alone = dict(RANK='0', LOCAL_RANK='0', WORLD_SIZE='1', MASTER_ADDR='127.0.0.1', MASTER_PORT='0')
    env = {**environment(), **alone}
    # As it is in a pipe or a file: what stands in the buffer must not be lost.
    env.pop('PYTHONUNBUFFERED')
    done = subprocess.run([sys.executable, str(script)], env=env, text=True, stdout=subprocess.PIPE, timeout=300)
    assert done.returncode == 0
    return done.stdout.splitlines()


def test_a_rank_ends_without_finalization(tmp_path: Path) -> None:
    """gloo's threads abort a process that finalizes Python while they hold tensors; all else ends as ever."""
    assert lines(tmp_path, with_group=True) == ['main done', 'thread done', 'exit handler']


def test_a_process_without_a_group_ends_as_ever(tmp_path: Path) -> None:
    assert lines(tmp_path, with_group=False) == ['main done', 'group False', 'thread done', 'exit handler', 'finalized']
