"""Models and helpers of the tests of compiled units."""

import os
from typing import Any

import torch
from mmengine.model import BaseModel
from torch import nn

from tests.models import TinyViT

LAYERS = dict(type='ModuleClassPolicy', classes=['Layer'])


def vit() -> TinyViT:
    return TinyViT(dropout=0.0)


class Broken(nn.Module):
    """A unit with a batch norm, whose graph breaks in the middle."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x))
        # What a graph cannot hold.
        os.environ['MMZERO_TEST_SEEN'] = 'yes'
        return x + torch.tanh(self.conv(x))


class Convs(BaseModel):
    """Two such units, in a row or in one unit that holds them."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 1)
        self.blocks = nn.Sequential(Broken(width), Broken(width))
        self.head = nn.Linear(width, 7)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None, mode: str = 'tensor') -> Any:
        logits = self.head(self.blocks(self.stem(inputs)).mean((2, 3)))
        return dict(loss=nn.functional.cross_entropy(logits, labels)) if mode == 'loss' else list(logits)


BROKEN = dict(type='ModuleClassPolicy', classes=['Broken'])


def sized_batch(seed: int, size: int = 16) -> dict:
    """Images for Convs, of any size."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(4, 3, size, size, generator=generator)
    return dict(inputs=inputs, labels=torch.randint(0, 7, (4,), generator=generator))
