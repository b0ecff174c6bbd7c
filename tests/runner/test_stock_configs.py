"""No config that mmdet ships has a fault by these checks, but for those that MMEngine itself cannot build."""

import random
from pathlib import Path
from typing import Any

import pytest
from mmengine.config import Config

import mmzero  # noqa: F401
from mmzero.analysis.sweep.families import UNREADABLE, shipped_configs
from mmzero.config import Faults
from mmzero.runner.optim_check import check_optim_wrapper, check_schedulers
from mmzero.runner.parts import Parts, check_parts
from mmzero.runner.toplevel import check_top_level
from mmzero.runner.values import check_values

# What is wrong with configs of mmdet 3.3.0, by folder or name; each was tried with MMEngine's Runner or read there.
BROKEN = {
    'solov2/': 'train_cfg.by_epoch',  # the loop refuses it beside `type`
    'dsdl/': 'is missing',  # build_dataloader pops it; one has no batch size either
    'bytetrack/bytetrack_yolox_x_8xb4-amp-80e_crowdhuman-mot20': 'test_evaluator.type',  # MOTChallengeMetrics
    'bytetrack/bytetrack_yolox_x_8xb4-80e_crowdhuman-mot20': 'test_evaluator.type',
    'ocsort/': 'test_evaluator.type',
    'cascade_rpn/': 'sampling',  # RPNHead has no such argument
    'pascal_voc/faster-rcnn_r50_fpn_1x_voc0712-cocofmt': 'eval_mode',  # belongs to VOCMetric
    'v3det/': 'force_grad_on_level',  # FPN has no such argument
    'qdtrack/qdtrack_faster-rcnn_r50_fpn_4e_base': 'is missing, and',  # a base without data
}


def stock_configs() -> list[Path]:
    """All that mmdet ships, bases left out."""
    return sorted(path for paths in shipped_configs().values() for path in paths)


def faults_of(cfg: dict) -> list[str]:
    faults = Faults()
    check_top_level(cfg, faults)
    parts = Parts(cfg.get('default_scope') or 'mmengine', faults)
    check_parts(cfg, parts)
    optimizer = check_optim_wrapper(cfg.get('optim_wrapper'), faults, parts)
    check_schedulers(cfg.get('param_scheduler'), optimizer, cfg.get('train_cfg'), parts.scope, faults)
    check_values(cfg, faults)
    return faults.lines


def unexpected(path: Path) -> list[str] | None:
    """Faults of a config that are not known to be real; None where it cannot be read."""
    try:
        cfg: Any = Config.fromfile(path)
    except UNREADABLE:
        return None
    name = '/'.join(path.parts[-2:])
    known = [word for start, word in BROKEN.items() if name.startswith(start)]
    return [f'{name}: {line}' for line in faults_of({**cfg}) if not any(word in line for word in known)]


def assert_clean(paths: list[Path]) -> int:
    found = [unexpected(path) for path in paths]
    wrong = [line for lines in found for line in lines or ()]
    assert not wrong, '\n'.join(wrong)
    return sum(lines is not None for lines in found)


def test_a_sample() -> None:
    paths = random.Random(0).sample(stock_configs(), 60)
    assert assert_clean(paths) >= 50


@pytest.mark.slow
def test_all() -> None:
    assert assert_clean(stock_configs()) >= 800
