"""DINO with Swin-L, of every width and depth, trains from a disk as from host memory (ZeRO-Infinity)."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from tests.distributed.ranks import run_ranks
from tests.distributed.test_deepspeed_nvme import disk, on_disk  # noqa: F401
from tests.models import detection_batch

pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed, pytest.mark.slow]

CONFIG = 'configs/dino_swin_l_zero3.py'
SIDE = 128
NUMEL = 218_332_544
OPTIONS = dict(zero_optimization=dict(sub_group_size=2e7))


def swin_l() -> torch.nn.Module:
    import mmdet.models  # noqa: F401

    model = Config.fromfile(CONFIG).model
    # Nothing is downloaded.
    model.backbone.init_cfg = None
    with DefaultScope.overwrite_default_scope('mmdet'):
        built: Any = MODELS.build(model)
    built.init_weights()
    return built


def trained(offload: dict[str, Any], half: bool) -> tuple[list[float], int, bool]:
    torch.manual_seed(0)
    precision: dict[str, Any] = dict(precision=dict(param_dtype='bfloat16')) if half else {}
    model = ZeroModelWrapper(
        module=swin_l(), stage=3, engine='deepspeed', offload=offload, engine_options=OPTIONS, **precision
    )
    numel = sum(param.numel() for param in model.parameters())
    optim = ZeroOptimWrapper(
        torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-4),
        clip_grad=dict(max_norm=0.1),
        dtype='bfloat16' if half else None,
    )
    optim.initialize_count_status(model, 0, 3)
    model.train()
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        data = detection_batch(2 * step + dist.get_rank(), images=1, size=SIDE)
        losses.append(float(model.train_step(data, optim)['loss']))
    return losses, numel, all(on_disk(model))


@pytest.mark.parametrize('half', [False, True])
def test_swin_l(half: bool, disk: Path) -> None:  # noqa: F811
    def of(offload: dict[str, Any]) -> list[tuple[list[float], int, bool]]:
        return run_ranks(2, trained, offload, half, timeout=1800)

    found = of(dict(params='nvme', optimizer='nvme', nvme_path=str(disk)))
    wanted = of(dict(params='cpu', optimizer='cpu'))
    assert [numel for _, numel, _ in found] == [NUMEL] * 2 and all(there for *_, there in found)
    assert [losses for losses, *_ in found] == [losses for losses, *_ in wanted]
    assert not list(disk.iterdir())
