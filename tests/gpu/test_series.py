"""DINO Swin-L at two images of 1333x800: what a GPU's memory and time go to; prints the table of the README."""

import functools

import pytest
import torch
from mmdet.testing import demo_mm_inputs
from mmengine.config import Config

from mmzero.analysis.series import STOCK, detector, measure_series, series_table
from mmzero.analysis.sweep.families import read
from tests.distributed.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU'),
]

CONFIG = 'mmdet::dino/dino-5scale_swin-l_8xb2-12e_coco.py'


def attention_operator() -> str:
    """Which operator deformable attention runs."""
    from mmcv.utils import ext_loader

    ext = ext_loader.load_ext('_ext', ['ms_deform_attn_forward'])
    return "mmcv's compiled one" if getattr(ext, '__file__', None) else "mmcv's PyTorch path"


def series() -> dict:
    torch.cuda.init()
    config: Config = read(CONFIG)
    batch = functools.partial(
        demo_mm_inputs, 2, [(3, 800, 1333)] * 2, num_items=[10, 10], num_classes=80, with_mask=False
    )
    return measure_series(detector(config, 1333), batch, 8, torch.device('cuda'))


def test_each_step_takes_less_memory() -> None:
    (found,) = run_ranks(1, series, backend='nccl')
    print(f'\ndeformable attention: {attention_operator()}\n{series_table(found)}')
    stock, plain, bf16, backbone, encoder, offloaded, budget = (one.peak for one in found.values())
    assert list(found)[0] == STOCK
    assert plain < 1.05 * stock
    assert encoder < backbone < bf16 < plain
    assert offloaded < encoder
    assert encoder < budget < bf16
