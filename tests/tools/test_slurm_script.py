"""slurm_train.sh starts a run that was preempted again; srun and scontrol are stand-ins."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.tools.processes import ROOT


def start(tmp_path: Path, codes: list[int], **variables: str) -> tuple[int, list[str]]:
    """Run the script with an srun that gives these exit codes; gives the script's own, and what was called."""
    folder, log = tmp_path / 'bin', tmp_path / 'log'
    folder.mkdir()
    (tmp_path / 'codes').write_text('\n'.join(map(str, codes)) + '\n')
    srun = f'echo srun "$@" >> {log}; code=$(head -n 1 {tmp_path}/codes); sed -i 1d {tmp_path}/codes; exit "$code"'
    for name, text in (('srun', srun), ('scontrol', f'echo scontrol "$@" >> {log}')):
        (folder / name).write_text(f'#!/usr/bin/env bash\n{text}\n')
        (folder / name).chmod(0o755)
    environment = {**os.environ, 'PATH': f'{folder}:{os.environ["PATH"]}', **variables}
    done = subprocess.run(
        [str(ROOT / 'tools/slurm_train.sh'), 'part', 'job', 'config.py', 'dir', '--amp'], env=environment, check=False
    )
    return done.returncode, log.read_text().splitlines()


@pytest.mark.parametrize('code', [0, 1])
def test_other_codes_end_it(tmp_path: Path, code: int) -> None:
    found, calls = start(tmp_path, [code])
    assert found == code
    assert len(calls) == 1
    assert calls[0].endswith('config.py --launcher slurm --work-dir dir --amp')


def test_it_is_started_again(tmp_path: Path) -> None:
    found, calls = start(tmp_path, [85, 85, 0])
    assert found == 0
    assert [call.endswith('--amp --resume') for call in calls] == [False, True, True]


def test_a_batch_job_is_requeued(tmp_path: Path) -> None:
    found, calls = start(tmp_path, [85], SLURM_JOB_ID='7')
    assert found == 0
    assert calls[1:] == ['scontrol requeue 7']


def test_a_requeued_job_goes_on(tmp_path: Path) -> None:
    _, calls = start(tmp_path, [0], SLURM_JOB_ID='7', SLURM_RESTART_COUNT='1')
    assert calls[0].endswith('--work-dir dir --resume --amp')
