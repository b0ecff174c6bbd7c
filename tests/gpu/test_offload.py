"""What is kept for backward goes to pinned host memory and comes back: only a GPU shows the copies."""

import pytest
import torch
from torch import nn

from mmzero.config import CheckpointingConfig
from mmzero.patches import apply_patches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU'),
]

WIDTH, ROWS, DEPTH = 1024, 8192, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def trained(config: CheckpointingConfig) -> tuple[list[torch.Tensor], int, int]:
    """Gradients of two steps, bytes kept on the GPU after the second forward, and those moved."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(DEPTH))).cuda()
    applied = apply_patches(model, config)
    for step in range(2):
        torch.manual_seed(step)
        x = torch.randn(ROWS, WIDTH, device='cuda')
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = model(x).square().mean()
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before
        loss.backward()
    moved = next((region.host.moved for region in applied.regions.values()), 0)
    return [param.grad for param in model.parameters()], kept, moved


@pytest.mark.parametrize('save', ['inputs', 'all'])
def test_gradients_stay_and_memory_is_freed(save: str) -> None:
    blocks = tuple(str(index) for index in range(DEPTH))
    plain, all_kept, _ = trained(CheckpointingConfig())
    offloaded, kept, moved = trained(CheckpointingConfig(modules=blocks, save=save, offload='cpu'))
    assert all(torch.equal(one, other) for one, other in zip(plain, offloaded, strict=True))
    assert moved >= 2 * DEPTH * ROWS * WIDTH * 4
    # The output of the last block is kept by the loss.
    assert kept < all_kept / 4
