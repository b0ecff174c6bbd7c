"""What only a GPU can show: the pair on CUDA with NCCL. Run `pytest tests/gpu` where there is one."""

import pytest
import torch

from tests.distributed import parity
from tests.distributed.parity import SETTINGS, Cell
from tests.distributed.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU'),
]


def cells(model: str, **changes: str) -> list[Cell]:
    choices = dict(dict(units='blocks', accumulation=4, clip='norm', optimizer='adamw', model=model), **changes)
    return [Cell(setting=setting, **choices) for setting in SETTINGS]


@pytest.mark.parametrize('model', ['vit', 'decoder', 'toy'])
def test_stages_equal_ddp_on_cuda(model: str) -> None:
    found = run_ranks(torch.cuda.device_count(), parity.on_rank, cells(model), backend='nccl')[0]
    assert not parity.faults(dict(zip(cells(model), found, strict=True)))


def bf16_dino() -> dict[str, list[float]]:
    changes = dict(optim=dict(dtype='bfloat16'), wrapper=dict(precision=dict(param_dtype='bfloat16')))
    return {
        cell.setting: cell.run(**{name: dict(value) for name, value in changes.items()})['losses']
        for cell in cells('dino')
    }


def test_bf16_dino_trains_on_cuda() -> None:
    losses = run_ranks(torch.cuda.device_count(), bf16_dino, backend='nccl')[0]
    for setting in ('stage 1', 'stage 2', 'stage 3'):
        assert losses[setting] == pytest.approx(losses['stage 0'], rel=0.05)
