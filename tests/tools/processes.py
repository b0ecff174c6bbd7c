"""Running the tools as a user does."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = (sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node')


def mmdet_tool(name: str) -> Path:
    """Path of one of mmdet's own tools, as its wheel ships them."""
    import mmdet

    return Path(mmdet.__file__).parent / '.mim' / 'tools' / name


def environment() -> dict[str, str]:
    """This process's environment, with mmzero importable from any folder."""
    return dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1', PYTHONUNBUFFERED='1')


def run(*command: Any, timeout: int = 400) -> subprocess.CompletedProcess:
    """Run a command from the repository's root.

    Returns:
        subprocess.CompletedProcess: Its exit code, and stdout and stderr in one.
    """
    words = [str(word) for word in command]
    return subprocess.run(
        words,
        cwd=ROOT,
        env=environment(),
        timeout=timeout,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def succeed(*command: Any, timeout: int = 400) -> str:
    """Run a command that has to succeed; returns what it printed."""
    done = run(*command, timeout=timeout)
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout
