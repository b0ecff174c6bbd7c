"""What the README promises of the shipped configs, run in full. Slow: minutes each."""

import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.processes import ROOT, TORCHRUN, mmdet_tool, succeed

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

DEMO = ROOT / 'configs/dino_swin_tiny_digits_zero3.py'
STOCK = ROOT / 'configs/_base_/dino_swin_tiny_digits.py'
FULL_SIZE = ROOT / 'configs/dino_swin_l_digits_zero3.py'
TRAIN = ROOT / 'tools/train.py'


def scalars(work: Path) -> list[dict[str, Any]]:
    """Rows of the newest run's log that hold losses."""
    newest = max(work.glob('*/vis_data/scalars.json'), key=lambda path: path.stat().st_mtime)
    rows = [json.loads(line) for line in newest.read_text().splitlines()]
    return [row for row in rows if 'loss' in row]


@pytest.fixture(scope='module')
def data() -> None:
    """The digits where the configs look for them."""
    succeed(sys.executable, ROOT / 'tools/dataset_converters/digits_coco.py')


@pytest.fixture(scope='module')
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Work dir of the whole demo."""
    work = tmp_path_factory.mktemp('demo')
    log = succeed(sys.executable, ROOT / 'tools/demo.py', '--work-dir', work, timeout=1500)
    (work / 'log.txt').write_text(log)
    return work


def test_demo_learns_and_draws(demo: Path) -> None:
    found = re.search(r'AP ([\d.]+), AP50 ([\d.]+) on the val images', (demo / 'log.txt').read_text())
    assert found and float(found[2]) > 0.3, found
    assert (demo / 'curves.png').stat().st_size > 10_000 and (demo / 'detections.png').stat().st_size > 10_000


def test_stock_mmdet_evaluates_the_demo_alike(demo: Path, tmp_path: Path) -> None:
    """mmdet's own test.py, with a config that does not name mmzero, on every val image."""
    checkpoint = (demo / 'last_checkpoint').read_text()
    ours, theirs = tmp_path / 'ours.pkl', tmp_path / 'theirs.pkl'
    succeed(sys.executable, ROOT / 'tools/test.py', DEMO, checkpoint, '--out', ours, '--work-dir', tmp_path)
    stock = (sys.executable, '-m', 'mmzero.integrations.mmcv', mmdet_tool('test.py'))
    assert 'ZeRO' not in succeed(*stock, STOCK, checkpoint, '--out', theirs, '--work-dir', tmp_path)
    first, second = (
        {item['img_id']: item['pred_instances'] for item in pickle.loads(path.read_bytes())} for path in (ours, theirs)
    )
    assert len(first) == 100 and first.keys() == second.keys()
    for image, found in first.items():
        for field in ('bboxes', 'scores'):
            torch.testing.assert_close(found[field], second[image][field], rtol=0, atol=1e-5)


def test_stage_3_follows_stage_0(data: None, tmp_path: Path) -> None:
    """Five steps of the demo on two ranks."""
    rows = []
    for stage in (0, 3):
        work = tmp_path / str(stage)
        options = [f'model_wrapper_cfg.stage={stage}', 'default_hooks.logger.interval=1', 'train_cfg.max_epochs=1']
        options += ['train_dataloader.dataset.indices=80', 'log_processor.window_size=1']
        # Under seed 0 the fourth step lies on a kink: stage 0 itself moves by 1e-5 there if lr changes by 1e-7.
        options.append('randomness.seed=1')
        succeed(*TORCHRUN, 2, TRAIN, DEMO, '--launcher', 'pytorch', '--work-dir', work, '--cfg-options', *options)
        rows.append(scalars(work))
    assert len(rows[0]) == len(rows[1]) == 5
    for reference, found in zip(*rows, strict=True):
        for name in ('loss', 'grad_norm'):
            assert found[name] == pytest.approx(reference[name], rel=1e-6), name


def test_mmdets_own_train_py_trains_the_demo_config(data: None, tmp_path: Path) -> None:
    options = ['train_cfg.max_epochs=1', 'train_dataloader.dataset.indices=32']
    tool = mmdet_tool('train.py')
    log = succeed(*TORCHRUN, 2, tool, DEMO, '--launcher', 'pytorch', '--work-dir', tmp_path, '--cfg-options', *options)
    assert 'ZeRO stage 3 on 1 x 2 ranks' in log and (tmp_path / 'epoch_1.pth').is_file()


def test_full_size_dino_trains_and_resumes(data: None, tmp_path: Path) -> None:
    """218 M parameters on two ranks: saved after two iterations, resumed, with the losses of the unbroken run."""
    assert sum(value.numel() for value in full_size_weights(tmp_path).values()) > 217e6
    unbroken = scalars(tmp_path)
    (tmp_path / 'last_checkpoint').write_text(str(tmp_path / 'iter_2.pth'))
    train_full_size(tmp_path, '--resume')
    resumed = scalars(tmp_path)
    assert [row['iter'] for row in unbroken] == [1, 2, 3, 4] and [row['iter'] for row in resumed] == [3, 4]
    for before, after in zip(unbroken[2:], resumed, strict=True):
        assert (before['loss'], before['grad_norm']) == (after['loss'], after['grad_norm'])
    for path in tmp_path.glob('*.pth'):
        path.unlink()  # 2.6 GB each


def full_size_weights(work: Path) -> dict[str, torch.Tensor]:
    train_full_size(work)
    return torch.load(work / 'iter_2.pth', weights_only=True, mmap=True)['state_dict']


def train_full_size(work: Path, *arguments: str) -> None:
    options = [
        'train_cfg.max_iters=4',
        'default_hooks.checkpoint.interval=2',
        'default_hooks.checkpoint.max_keep_ckpts=2',
    ]
    options += ['log_processor.window_size=1']
    command = (*TORCHRUN, 2, TRAIN, FULL_SIZE, '--launcher', 'pytorch', '--work-dir', work, *arguments)
    succeed(*command, '--cfg-options', *options, timeout=900)
