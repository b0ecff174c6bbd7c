"""Whole trainings compared: the judging on made-up losses, the configs, and the tool on the digits."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mmengine.config import Config
from PIL import Image

from mmzero.analysis.curves import Curve, Losses, curve_config, curves_table, judge, planned, train_all, write_curves
from mmzero.analysis.curves.run import DONE
from mmzero.errors import ConfigError, DataError
from tests.runs import digits_config

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / 'tools/analysis_tools/compare_curves.py'
NAN = math.nan


def losses(dtype: str, seed: int, end: float, *, steps: int = 60, skipped: int = 0) -> Losses:
    """A training that stands still for its last 50 steps."""
    return Losses(Curve(dtype, seed), (20.0,) * (steps - 50) + (end,) * 50, skipped, {'coco/bbox_mAP': 0.5})


REFERENCES = [losses('float32', seed, end) for seed, end in enumerate((9.0, 10.0, 11.0))]
CLOSE = [losses('float32', seed, end) for seed, end in enumerate((9.9, 10.0, 10.1))]


@pytest.mark.parametrize(
    'references, end, holds',
    [
        (REFERENCES, 9.0, True),
        (REFERENCES, 10.9, True),
        (REFERENCES, 8.9, False),
        (REFERENCES, 11.1, False),
        # Within 2% of the mean, where the seeds lie closer together.
        (CLOSE, 10.19, True),
        (CLOSE, 9.81, True),
        (CLOSE, 10.21, False),
        (CLOSE, 9.79, False),
        (CLOSE, NAN, False),
    ],
)
def test_the_verdict(references: list[Losses], end: float, holds: bool) -> None:
    found = [*references, losses('bfloat16', 0, end)]
    (verdict,) = judge(found)
    assert verdict.holds is holds
    assert ('DOES NOT HOLD' in curves_table(found, [verdict])) is not holds


def test_several_seeds_are_judged_by_their_mean() -> None:
    half = [losses('bfloat16', seed, end) for seed, end in ((0, 11.5), (4, 9.0))]
    (verdict,) = judge([*REFERENCES, *half])
    assert verdict.holds and verdict.seeds == (0, 4) and verdict.end == 10.25


def test_the_start_does_not_count() -> None:
    (verdict,) = judge([*CLOSE, losses('float16', 0, 10.0, steps=60)])
    assert verdict.end == 10.0 and verdict.apart == pytest.approx(0)


@pytest.mark.parametrize(
    'found, said',
    [
        ([losses('bfloat16', 0, 1.0)], 'there is none'),
        ([*CLOSE, losses('bfloat16', 0, 10.0, steps=59)], 'over the same steps'),
        ([Losses(Curve('float32', 0), (1.0,), 0, {})], '50 or more'),
        ([], '50 or more'),
    ],
)
def test_what_cannot_be_compared(found: list[Losses], said: str) -> None:
    with pytest.raises(DataError, match=said):
        judge(found)


def test_what_is_written(tmp_path: Path) -> None:
    found = [*REFERENCES, losses('bfloat16', 0, 10.0), losses('float16', 0, 12.0, skipped=2)]
    data_file, picture = write_curves(found, judge(found), tmp_path / 'out')
    data = json.loads(data_file.read_text())
    assert [training['losses'][-1] for training in data['trainings']] == [9.0, 10.0, 11.0, 10.0, 12.0]
    assert [verdict['holds'] for verdict in data['verdicts']] == [True, False]
    with Image.open(picture) as image:
        assert min(image.size) >= 400
    table = curves_table(found, judge(found))
    assert '| mmzero float16, seed 0 | 12.0000 | 2 | 0.500 |' in table


def config(tmp_path: Path, digits: str = 'data', **changes: Any) -> Config:
    return digits_config(digits, str(tmp_path / 'work'), **changes)


def test_the_configs_of_the_trainings(tmp_path: Path) -> None:
    cfg = config(tmp_path, optim_wrapper__dtype='float16', optim_wrapper__max_skips=3)
    cfg.default_hooks.visualization = dict(type='DetVisualizationHook')
    before = cfg.pretty_text
    assert [str(curve) for curve in planned([3, 1], ['bfloat16'])] == [
        'DDP float32, seed 3', 'DDP float32, seed 1', 'mmzero bfloat16, seed 3'
    ]  # fmt: skip
    pairs = planned([0], ['bfloat16', 'float16'], [1, 2])[1:]
    assert [(curve.dtype, curve.seed) for curve in pairs] == [
        ('bfloat16', 1), ('bfloat16', 2), ('float16', 1), ('float16', 2)
    ]  # fmt: skip
    stock = curve_config(cfg, Curve('float32', 3), 'there')
    assert 'runner_type' not in stock and stock.model_wrapper_cfg.type == 'MMDistributedDataParallel'
    assert 'dtype' not in stock.optim_wrapper and 'max_skips' not in stock.optim_wrapper
    assert stock.randomness.seed == 3 and stock.work_dir == 'there' and stock.launcher == 'pytorch'
    half = curve_config(cfg, Curve('bfloat16', 1), 'there')
    assert half.model_wrapper_cfg == cfg.model_wrapper_cfg and half.optim_wrapper.dtype == 'bfloat16'
    for derived in (stock, half):
        assert derived.log_processor.window_size == derived.default_hooks.logger.interval == 1
        assert derived.default_hooks.checkpoint is None and 'visualization' not in derived.default_hooks
        assert derived.optim_wrapper.optimizer == cfg.optim_wrapper.optimizer
    assert cfg.pretty_text == before
    del cfg.model_wrapper_cfg['type']
    with pytest.raises(ConfigError, match='curves are of a config with'):
        curve_config(cfg, Curve('float32', 0), 'there')


@pytest.mark.slow
@pytest.mark.distributed
def test_a_training_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match='exit code .*output.txt'):
        train_all(config(tmp_path, 'nowhere'), [Curve('bfloat16', 0)], tmp_path, 1)
    assert 'nowhere' in (tmp_path / 'bfloat16-seed0/output.txt').read_text()
    assert not (tmp_path / 'bfloat16-seed0' / DONE).exists()


@pytest.mark.slow
@pytest.mark.distributed
def test_a_few_steps_and_what_is_complete_is_not_trained_again(
    tmp_path: Path, digits: str, capsys: pytest.CaptureFixture
) -> None:
    # The window of a log's means would hide what single steps lose.
    cfg, curves = config(tmp_path, digits), [Curve('float32', 0), Curve('bfloat16', 0)]
    cfg.visualizer = dict(type='Visualizer', vis_backends=[dict(type='LocalVisBackend')])
    stock, half = train_all(cfg, curves, tmp_path / 'out', 2)
    assert len(stock.losses) == len(half.losses) == 4
    # The same weights and data, to begin with.
    assert half.losses[0] == pytest.approx(stock.losses[0], rel=0.03) and half.losses[0] != stock.losses[0]
    assert 'training' in capsys.readouterr().out
    assert train_all(cfg, curves, tmp_path / 'out', 2) == [stock, half]
    assert 'training' not in capsys.readouterr().out


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, so that the references are trained once; with the data of the demo."""
    pytest.importorskip('sklearn')
    out = tmp_path_factory.mktemp('curves')
    converter = ROOT / 'tools/dataset_converters/digits_coco.py'
    subprocess.run([sys.executable, str(converter), '--out', str(out / 'digits')], check=True)
    return out


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize('dtype, seeds', [('bfloat16', '0 1 2'), ('float16', '0')])
def test_300_steps_on_the_digits_end_where_ddp_does(folder: Path, dtype: str, seeds: str) -> None:
    """Half an hour or more on two cores, float16 most of it; docs/precision.md has the picture."""
    data = folder / 'digits'
    options = [f'{split}_dataloader.dataset.data_root={data}' for split in ('train', 'val', 'test')]
    options += [f'{split}_evaluator.ann_file={data}/annotations/val.json' for split in ('val', 'test')]
    options += ['train_dataloader.batch_size=4', 'train_dataloader.dataset.indices=800']
    command = [sys.executable, str(TOOL), str(ROOT / 'configs/dino_swin_tiny_digits_zero3.py'), '--dtypes', dtype]
    command += ['--half-seeds', *seeds.split(), '--out', str(folder / 'out'), '--cfg-options', *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((folder / 'out/curves.json').read_text())
    assert {len(training['losses']) for training in found['trainings']} == {300}
