"""A model that has what activation checkpointing gets wrong, and its gradients."""

import contextlib
import copy

import pytest
import torch
from torch import nn


class Block(nn.Module):
    """Dropout, a norm with running statistics, a keyword argument; counts its forwards."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)
        self.drop = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x, *, shift=0.0):
        self.calls += 1
        x = self.norm(x) + shift
        return x + self.down(self.drop(torch.relu(self.up(x))))


class Net(nn.Module):
    """Two blocks, the second of which runs twice."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.blocks[0](self.stem(x), shift=0.5)
        x = self.blocks[1](x)
        return self.blocks[1](x, shift=torch.ones(8))


def train_step(model, autocast=False):
    """One forward and backward on fixed data and random state."""
    torch.manual_seed(1)
    x = torch.randn(6, 8)
    context = torch.autocast('cpu', dtype=torch.bfloat16) if autocast else contextlib.nullcontext()
    with context:
        loss = model(x).square().mean()
    loss.backward()
    # What is drawn next: recomputing must not move the random state.
    return dict(loss=loss.detach(), drawn=torch.rand(3)), model


def results(model, autocast=False):
    """All that a step computes, by name."""
    found, model = train_step(model, autocast)
    found.update({f'grad of {name}': param.grad for name, param in model.named_parameters()})
    found.update({name: buffer.clone() for name, buffer in model.named_buffers()})
    return found


@pytest.fixture
def net() -> Net:
    """A model in train mode."""
    torch.manual_seed(0)
    return Net().train()


@pytest.fixture
def same_step():
    """Check that a patched model computes bitwise what a copy without patches does."""

    def check(plain, patched, autocast=False):
        expected, found = results(plain, autocast), results(patched, autocast)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.equal(value, found[name]), name

    return check


@pytest.fixture
def twin(net):
    """A copy of ``net`` that stays as it is."""
    return copy.deepcopy(net)
