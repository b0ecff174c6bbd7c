"""ZeRO-Infinity: parameters on a disk train as in memory, and leave nothing behind."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero.engines.deepspeed.package import import_deepspeed
from tests.distributed.cases import Faults, merged
from tests.distributed.ranks import run_ranks
from tests.distributed.test_evaluated_alone import SMALL, evaluated
from tests.models import TinyViT, image_batch

pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed, pytest.mark.slow]

PARTITIONED = dict(zero_optimization=dict(stage3_param_persistence_threshold=50))


def trained(offload: dict[str, Any], half: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    fields: dict[str, Any] = dict(precision=dict(param_dtype='bfloat16')) if half else {}
    model = ZeroModelWrapper(
        module=TinyViT(dropout=0.0), stage=3, engine='deepspeed', offload=offload, engine_options=PARTITIONED, **fields
    )
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=1e-3)
    settings = dict(clip_grad=dict(max_norm=0.5), accumulative_counts=2, dtype='bfloat16' if half else None)
    optim = ZeroOptimWrapper(optimizer, **settings)  # type: ignore[arg-type]
    optim.initialize_count_status(model, 0, 6)
    model.train()
    size, rank = dist.get_world_size(), dist.get_rank()
    losses = [float(model.train_step(image_batch(step * size + rank), optim)['loss'].detach()) for step in range(6)]
    return losses, model.engine.model_state()


def compared(folder: str, half: bool) -> Faults:
    found: Faults = {}
    for optimizer in (None, 'cpu'):
        wanted, weights = trained(dict(params='cpu', optimizer=optimizer), half)
        losses, own = trained(dict(params='nvme', optimizer=optimizer, nvme_path=folder), half)
        found[f'optimizer: {optimizer}'] = [] if losses == wanted else [f'losses {losses}, not {wanted}']
        found[f'optimizer: {optimizer}'] += [
            name for name, value in weights.items() if not torch.equal(value, own[name])
        ]
    return found


def can_be_built(_: None = None) -> bool:
    builder: Any = import_deepspeed('cpu').accelerator.get_accelerator().create_op_builder('AsyncIOBuilder')
    return bool(builder.is_compatible(verbose=False))


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (built,) = run_ranks(1, can_be_built)
    if not built:
        pytest.skip('async_io needs libaio')
    path = tmp_path / 'disk'
    path.mkdir()
    return path


def test_evaluated_from_a_disk(tmp_path: Path, disk: Path) -> None:
    settings = {'from a disk': dict(SMALL, offload=dict(params='nvme', optimizer='cpu', nvme_path=str(disk)))}
    for case, faults in merged(run_ranks(2, evaluated, str(tmp_path), settings)).items():
        assert not faults, f'{case}: {faults}'
    assert not list(disk.iterdir())


@pytest.mark.parametrize('half', [False, True])
def test_on_a_disk(half: bool, disk: Path) -> None:
    for case, faults in merged(run_ranks(2, compared, str(disk), half)).items():
        assert not faults, f'{case}: {faults}'
    assert not list(disk.iterdir())
