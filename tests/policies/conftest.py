"""Small models for policies."""

import pytest
import torch
from torch import nn


class Block(nn.Module):
    """Two layers of 4 x 4 and a norm: 48 elements."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4, bias=True)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


class FancyBlock(Block):
    """A subclass."""


class Net(nn.Module):
    """Blocks of two classes, a scalar, and a head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.blocks = nn.Sequential(Block(), Block(), FancyBlock())
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(4, 2)


@pytest.fixture
def net() -> Net:
    """A model of nested modules."""
    return Net()
