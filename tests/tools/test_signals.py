"""Ctrl-C and SIGTERM end every rank and every data worker within seconds."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import digits_config
from tests.tools.processes import ROOT, TORCHRUN, environment

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# torchrun itself waits 30 s for a rank that does not end, and kills it then.
SECONDS = 20


@pytest.fixture
def config(digits: str, tmp_path: Path) -> Path:
    cfg = digits_config(digits, str(tmp_path / 'work'), train_cfg__max_epochs=10000, train_dataloader__num_workers=1)
    cfg.dump(tmp_path / 'config.py')
    return tmp_path / 'config.py'


def descendants(pid: int) -> list[int]:
    """Processes below a process."""
    children = Path(f'/proc/{pid}/task/{pid}/children')
    pids = [int(word) for word in children.read_text().split()] if children.exists() else []
    return pids + [below for child in pids for below in descendants(child)]


def lines_until(process: subprocess.Popen, text: str) -> Iterator[str]:
    for line in process.stdout:  # type: ignore[union-attr]
        yield line
        if text in line:
            return
    raise AssertionError(f'the run ended before {text!r}')


@pytest.mark.parametrize('ranks', [2, 0])
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_everything(config: Path, number: int, ranks: int) -> None:
    launch = [*TORCHRUN, str(ranks)] if ranks else [sys.executable]
    launcher = 'pytorch' if ranks else 'none'
    process = subprocess.Popen(
        [*launch, str(ROOT / 'tools/train.py'), str(config), '--launcher', launcher],
        cwd=ROOT,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    pids = []
    try:
        list(lines_until(process, 'Epoch(train)'))
        pids = descendants(process.pid)
        # With a launcher the ranks, and a data worker of each.
        assert len(pids) >= 2 * ranks + (ranks == 0)
        process.send_signal(number)
        started = time.monotonic()
        process.communicate(timeout=SECONDS)
        assert process.returncode != 0
        while (left := [pid for pid in pids if Path(f'/proc/{pid}').exists()]) and time.monotonic() < started + SECONDS:
            time.sleep(0.2)
        assert not left, 'processes were left behind'
    finally:
        for pid in [process.pid, *pids]:
            if Path(f'/proc/{pid}').exists():
                os.kill(pid, signal.SIGKILL)
