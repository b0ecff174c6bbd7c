"""The main job through the tools: train on two ranks, resume, evaluate, and let stock mmdet read the result."""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs import digits_config
from tests.tools.processes import ROOT, TORCHRUN, mmdet_tool, run, succeed

pytestmark = pytest.mark.distributed

TRAIN, TEST = ROOT / 'tools/train.py', ROOT / 'tools/test.py'
STAND_IN = (sys.executable, '-m', 'mmzero.integrations.mmcv')


def write_config(path: Path, digits: str, **changes: Any) -> Path:
    digits_config(digits, str(path.parent / 'work'), **changes).dump(path)
    return path


@pytest.fixture(scope='module')
def trained(digits: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config, and in ``work`` a run of two epochs on two ranks at stage 3."""
    folder = tmp_path_factory.mktemp('road')
    config = write_config(folder / 'config.py', digits)
    folder.joinpath('log.txt').write_text(succeed(*TORCHRUN, 2, TRAIN, config, '--launcher', 'pytorch'))
    return folder


def losses(work: Path) -> list[float]:
    """Training losses of the newest run in a work dir."""
    newest = max(work.glob('*/vis_data/scalars.json'), key=lambda path: path.stat().st_mtime)
    rows = [json.loads(line) for line in newest.read_text().splitlines()]
    return [row['loss'] for row in rows if 'loss' in row]


def test_log_shows_plan_and_progress(trained: Path) -> None:
    log = (trained / 'log.txt').read_text()
    assert 'gathered and kept: MiB' in log and 'DeformableDetrTransformerEncoderLayer' in log
    assert 'activation checkpointing (non-re-entrant): 4 x SwinBlock' in log
    line = next(line for line in log.splitlines() if 'Epoch(train) [1][1/2]' in line)
    assert all(f'{name}:' in line for name in ('loss', 'lr', 'grad_norm', 'memory', 'time', 'eta'))
    assert 'coco/bbox_mAP' in log


def test_checkpoint_is_plain_and_clean(trained: Path) -> None:
    checkpoint = torch.load(trained / 'work/epoch_2.pth', weights_only=True)
    assert checkpoint['meta']['epoch'] == 2 and checkpoint['meta']['world_size'] == 2
    assert {'state_dict', 'optimizer', 'param_schedulers', 'message_hub', 'random_states'} <= checkpoint.keys()
    assert all(name.split('.')[0] in DINO_CHILDREN for name in checkpoint['state_dict'])


DINO_CHILDREN = {
    'backbone',
    'neck',
    'encoder',
    'decoder',
    'bbox_head',
    'query_embedding',
    'level_embed',
    'memory_trans_fc',
    'memory_trans_norm',
    'dn_query_generator',
}


def test_resume_goes_on_with_the_same_losses(trained: Path, digits: str, tmp_path: Path) -> None:
    config = write_config(tmp_path / 'config.py', digits)
    (tmp_path / 'work').mkdir()
    (tmp_path / 'work/last_checkpoint').write_text(str(trained / 'work/epoch_1.pth'))
    succeed(*TORCHRUN, 2, TRAIN, config, '--launcher', 'pytorch', '--resume')
    unbroken = losses(trained / 'work')
    assert len(unbroken) == 4 and losses(tmp_path / 'work') == unbroken[2:]
    first, second = (torch.load(folder / 'work/epoch_2.pth', weights_only=True) for folder in (trained, tmp_path))
    for name, weight in first['state_dict'].items():
        assert torch.equal(weight, second['state_dict'][name]), name


@pytest.mark.slow
@pytest.mark.parametrize('stage, ranks', [(0, 1), (1, 2), (2, 1)])
def test_resume_at_another_stage_and_world_size(
    trained: Path, digits: str, tmp_path: Path, stage: int, ranks: int
) -> None:
    config = write_config(tmp_path / 'config.py', digits, model_wrapper_cfg__stage=stage)
    log = succeed(*TORCHRUN, ranks, TRAIN, config, '--launcher', 'pytorch', '--resume', trained / 'work/epoch_1.pth')
    assert 'resumed epoch: 1' in log
    resumed = torch.load(tmp_path / 'work/epoch_2.pth', weights_only=True)
    assert resumed['optimizer']['state'].keys() == torch.load(trained / 'work/epoch_2.pth')['optimizer']['state'].keys()
    assert ('random states' in log) == (ranks != 2)


def predictions(path: Path) -> dict[int, Any]:
    with path.open('rb') as file:
        return {item['img_id']: item['pred_instances'] for item in pickle.load(file)}


def assert_same(first: Path, second: Path) -> None:
    ours, theirs = predictions(first), predictions(second)
    assert ours.keys() == theirs.keys() and len(ours) == 4
    for image, found in ours.items():
        for field in ('bboxes', 'scores'):
            torch.testing.assert_close(found[field], theirs[image][field], rtol=0, atol=1e-5)
        assert torch.equal(found['labels'], theirs[image]['labels'])


def test_stock_mmdet_predicts_the_same(trained: Path, digits: str, tmp_path: Path) -> None:
    checkpoint = trained / 'work/epoch_2.pth'
    ours, theirs = tmp_path / 'ours.pkl', tmp_path / 'theirs.pkl'
    succeed(sys.executable, TEST, trained / 'config.py', checkpoint, '--out', ours, '--work-dir', tmp_path)
    stock = digits_config(digits, str(tmp_path))
    for name in ('runner_type', 'model_wrapper_cfg'):
        stock.pop(name)
    stock.dump(tmp_path / 'stock.py')
    log = succeed(*STAND_IN, mmdet_tool('test.py'), tmp_path / 'stock.py', checkpoint, '--out', theirs)
    assert 'ZeRO' not in log
    assert_same(ours, theirs)


@pytest.mark.slow
def test_evaluation_on_two_ranks_without_a_training_part(trained: Path, digits: str, tmp_path: Path) -> None:
    bare = digits_config(digits, str(tmp_path / 'work'))
    for name in ('optim_wrapper', 'train_dataloader', 'train_cfg', 'param_scheduler'):
        bare.pop(name)
    bare.dump(tmp_path / 'bare.py')
    checkpoint = trained / 'work/epoch_2.pth'
    one, two = tmp_path / 'one.pkl', tmp_path / 'two.pkl'
    succeed(*TORCHRUN, 2, TEST, tmp_path / 'bare.py', checkpoint, '--launcher', 'pytorch', '--out', two)
    succeed(sys.executable, TEST, trained / 'config.py', checkpoint, '--out', one, '--work-dir', tmp_path)
    assert_same(one, two)


@pytest.mark.slow
def test_mmdets_own_train_py(digits: str, tmp_path: Path) -> None:
    config = write_config(tmp_path / 'config.py', digits, train_cfg__max_epochs=1)
    log = succeed(*TORCHRUN, 2, mmdet_tool('train.py'), config, '--launcher', 'pytorch')
    assert 'ZeRO stage 3 on 1 x 2 ranks' in log and (tmp_path / 'work/epoch_1.pth').is_file()


@pytest.mark.slow
def test_amp_and_auto_scale_lr(digits: str, tmp_path: Path) -> None:
    config = write_config(
        tmp_path / 'config.py', digits, train_cfg__max_epochs=1, auto_scale_lr=dict(base_batch_size=16)
    )
    log = succeed(
        *TORCHRUN,
        2,
        TRAIN,
        config,
        '--launcher',
        'pytorch',
        '--amp',
        '--auto-scale-lr',
        '--cfg-options',
        'val_cfg.fp16=False',
    )
    assert 'ZeroOptimWrapper in bfloat16' in log and 'Scaling the original LR by 0.25' in log


def test_errors_come_without_a_traceback(trained: Path, digits: str, tmp_path: Path) -> None:
    config = write_config(
        tmp_path / 'config.py', digits, model_wrapper_cfg__stage=4, train_dataloader__dataset__ann_file='no.json'
    )
    done = run(sys.executable, TRAIN, config)
    assert done.returncode == 2 and 'Traceback' not in done.stdout
    assert 'error: 2 faults in the config' in done.stdout and 'no.json; put the data set there' in done.stdout


def test_damaged_checkpoint(trained: Path, tmp_path: Path) -> None:
    whole = (trained / 'work/epoch_2.pth').read_bytes()
    half = tmp_path / 'half.pth'
    half.write_bytes(whole[: len(whole) // 2])
    done = run(sys.executable, TEST, trained / 'config.py', half, '--work-dir', tmp_path)
    assert done.returncode == 2 and 'Traceback' not in done.stdout
    assert 'is damaged or was cut off' in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_tta_runs_up_to_what_mmcv_lite_lacks(trained: Path, tmp_path: Path) -> None:
    """Weights are loaded and the detector inside predicts; merging needs nms, which the full mmcv has."""
    done = run(
        sys.executable, TEST, trained / 'config.py', trained / 'work/epoch_2.pth', '--tta', '--work-dir', tmp_path
    )
    assert 'loaded weights from' in done.stdout and "The mmcv op 'nms' was called" in done.stdout
