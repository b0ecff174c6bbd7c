"""Faulty configs through the tools, on one process and on two ranks: an exit code, the faults, and nobody left."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runs import digits_config
from tests.tools.processes import ROOT, TORCHRUN, environment, run

pytestmark = pytest.mark.distributed

TRAIN = ROOT / 'tools/train.py'
SECONDS = 300

FAULTY: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    'several': (
        {
            'model_wrapper_cfg.stage': 4,
            'model_wrapper_cfg.offload': dict(optimizer='nvme'),
            'model_wrapper_cfg.mesh': dict(shard=5),
            'model_wrapper_cfg.wrap_policy.classes': ['SwinBlok'],
            'optim_wrapper.dtype': 'float8',
            'optim_wrapper.optimizer.weight_decai': 0.1,
            'train_cfg.max_epoch': 3,
            'train_dataloader.dataset.pipeline': [dict(type='LoadImageFromFil')],
            'optim_wraper': dict(),
        },
        (
            'model_wrapper_cfg.stage: got 4; allowed: 0, 1, 2, 3',
            "model_wrapper_cfg.offload.optimizer: 'nvme' needs engine='deepspeed'; add it",
            'model_wrapper_cfg.mesh: replicate x shard = 1 x 5 = 5 does not fill',
            "no module of DINO is of the class 'SwinBlok'; did you mean 'SwinBlock'",
            "optim_wrapper.dtype: got 'float8'",
            "weight_decai: AdamW has no such field; did you mean 'weight_decay'?",
            'train_cfg.max_epoch: EpochBasedTrainLoop has no such field; did you mean',
            "train_dataloader.dataset.pipeline[0].type: no class 'LoadImageFromFil'",
            "optim_wraper: is no key that a runner reads; did you mean 'optim_wrapper'?",
        ),
    ),
    'in the first step': (
        {'model.neck.out_channels': 128, 'default_hooks.checkpoint.interval': 1},
        ('its traceback is in', '1 fault in the config:\n  model'),
    ),
}


def faulty_config(name: str, digits: str, folder: Path) -> Path:
    cfg = digits_config(digits, str(folder / 'work'))
    cfg.merge_from_dict(FAULTY[name][0])
    cfg.dump(folder / 'config.py')
    return folder / 'config.py'


def marked_processes(mark: str) -> list[str]:
    """Processes that have a variable in their environment, which they got from who started them."""
    found = []
    for path in Path('/proc').glob('[0-9]*/environ'):
        try:
            if mark.encode() in path.read_bytes().split(b'\0'):
                found.append(path.parent.name)
        except OSError:  # ended, or another user's
            continue
    return found


@pytest.mark.parametrize('name', FAULTY)
def test_one_process(digits: str, tmp_path: Path, name: str) -> None:
    done = run(sys.executable, TRAIN, faulty_config(name, digits, tmp_path), timeout=SECONDS)
    assert done.returncode == 2 and 'Traceback' not in done.stdout, done.stdout[-3000:]
    assert all(wanted in done.stdout for wanted in FAULTY[name][1]), done.stdout[-3000:]


@pytest.mark.parametrize('name', [pytest.param('several', marks=pytest.mark.slow), 'in the first step'])
def test_two_ranks(digits: str, tmp_path: Path, name: str) -> None:
    """torchrun adds a traceback of its own, so what the ranks print goes into files."""
    logs = ('--redirects', '3', '--log-dir', str(tmp_path / 'logs'))
    config = faulty_config(name, digits, tmp_path)
    mark = f'MMZERO_FAULTY_CONFIG={tmp_path}'
    done = subprocess.run(
        [*TORCHRUN, '2', *logs, str(TRAIN), str(config), '--launcher', 'pytorch'],
        cwd=ROOT,
        env=environment() | dict([mark.split('=')]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=SECONDS,
    )
    assert done.returncode != 0
    assert not marked_processes(mark)
    text = ''.join(path.read_text() for path in sorted((tmp_path / 'logs').rglob('*.log')))
    assert 'Traceback' not in text, text[-3000:]
    assert all(wanted in text for wanted in FAULTY[name][1]), text[-3000:]


@pytest.mark.parametrize('word', ['stage', '=4', 'model_wrapper_cfg.stage=[1,'])
def test_what_is_no_setting(word: str, tmp_path: Path) -> None:
    (tmp_path / 'config.py').write_text('')
    done = run(sys.executable, TRAIN, tmp_path / 'config.py', '--cfg-options', word)
    assert done.returncode == 2 and 'Traceback' not in done.stdout
    assert 'error: --cfg-options: ' in done.stdout


def test_a_config_that_python_refuses(tmp_path: Path) -> None:
    (tmp_path / 'config.py').write_text('model = 1 / 0\n')
    done = run(sys.executable, TRAIN, tmp_path / 'config.py')
    assert done.returncode == 2 and 'Traceback' not in done.stdout
    assert 'config.py: cannot be read: ZeroDivisionError: division by zero' in done.stdout
