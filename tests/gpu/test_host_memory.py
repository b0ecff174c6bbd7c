"""Parameters, gradients and optimizer state in host memory: only a GPU shows the copies, and what they save."""

from typing import Any

import pytest
import torch

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from tests.distributed.parity_features import Feature, precision
from tests.distributed.ranks import run_ranks
from tests.distributed.training import compare
from tests.models import TinyViT, image_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU'),
]

HOST = dict(offload=dict(params='cpu', optimizer='cpu'))
WIDTH, DEPTH = 1024, 8


def distances() -> dict[str, dict[str, float]]:
    """Runs on every rank: offloaded runs from those that are not, in fp32 with clipping and accumulation."""
    found = {}
    for stage in (1, 2, 3):
        pair = [
            Feature('', TinyViT, image_batch, 'Layer', wrapper, dict(accumulative_counts=2)).run(f'stage {stage}')
            for wrapper in (HOST, {})
        ]
        found[f'stage {stage}'] = compare(*pair)
    return found


def test_equal_to_what_is_not_offloaded() -> None:
    for ranks in run_ranks(torch.cuda.device_count(), distances, backend='nccl'):
        for setting, values in ranks.items():
            assert values['loss'] <= 1e-6 and values['update'] <= 1e-5, (setting, values)


def scaled() -> list[float]:
    wrapper = dict(precision('float16'), **HOST)
    optim = dict(dtype='float16', loss_scale=dict(init_scale=2.0**8))
    return Feature('', TinyViT, image_batch, 'Layer', wrapper, optim).run('stage 3')['losses']


def test_float16_trains() -> None:
    losses = run_ranks(torch.cuda.device_count(), scaled, backend='nccl')[0]
    assert all(loss < 10 for loss in losses)


def peak(wrapper: dict[str, Any]) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes on the GPU at the peak of a step, and what is saved afterwards."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    model = ZeroModelWrapper(
        module=net, stage=3, wrap_policy=dict(type='ModuleClassPolicy', classes=['Linear']), **wrapper
    )
    optim = ZeroOptimWrapper(torch.optim.AdamW(model.module.parameters(), lr=1e-3), clip_grad=dict(max_norm=1.0))
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        loss = model(torch.ones(4, WIDTH, device='cuda')).square().mean()
        optim.update_params(loss)
    for param in model.module.parameters():
        shard: Any = param
        assert shard.to_local().is_pinned() is bool(wrapper)
        state = optim.optimizer.state[param]
        assert {value.device.type for value in state.values() if value.dim()} == {'cpu' if wrapper else 'cuda'}
    size = torch.cuda.max_memory_allocated()
    saved = model.engine.model_state()
    state = model.engine.optimizer_state()
    model.engine.load_model_state(saved)
    model.engine.load_optimizer_state(state)
    optim.update_params(model(torch.ones(4, WIDTH, device='cuda')).square().mean())
    return size, model.engine.model_state()


def peaks() -> tuple[int, int, bool]:
    (offloaded, one), (usual, other) = peak(HOST), peak({})
    close = all(torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-6) for name in other)
    return offloaded, usual, close


def test_the_gpu_holds_neither_shards_nor_state() -> None:
    for offloaded, usual, close in run_ranks(torch.cuda.device_count(), peaks, backend='nccl'):
        # 16 bytes per parameter stay without, and a few layers at once with.
        assert offloaded < usual / 2
        assert close
