"""What a region keeps: bytes by the kind of ``save``, and which operators run again."""

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from mmzero._compat import TorchDispatchMode
from mmzero.config import CheckpointingConfig
from mmzero.patches import checkpoint_module
from mmzero.patches.selective import SAVED_OPERATORS, _policy
from tests.models import Layer

ATEN = torch.ops.aten
CONFIGS = dict(
    inputs=CheckpointingConfig(),
    matmuls=CheckpointingConfig(save='matmuls'),
    all=CheckpointingConfig(save='all', offload='cpu'),
)


class Operators(TorchDispatchMode):
    """Counts what runs, and knows what memory of its results is still held."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter = Counter()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        result = func(*args, **(kwargs or {}))
        given = {key for key, _ in _storages((args, kwargs))}
        for key, storage in _storages(result):
            if key not in given:
                self.made[key] = StorageWeakRef(storage), storage.nbytes()
        return result

    def of(self, *operators: Any) -> int:
        """How often some ran."""
        return sum(self.counts[operator] for operator in operators)

    def held(self) -> int:
        """Bytes."""
        return sum(size for storage, size in self.made.values() if not storage.expired())


def _storages(values: Any) -> list[tuple[int, Any]]:
    storages = [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [(storage._cdata, storage) for storage in storages]


def layer(save: str = '') -> nn.Module:
    torch.manual_seed(0)
    module = Layer(16, 2, causal=False, dropout=0.1)
    if save:
        checkpoint_module(module, CONFIGS[save])
    return module


def run(module: nn.Module) -> tuple[Operators, Operators, list[torch.Tensor]]:
    """Operators of forward and of backward, and gradients."""
    torch.manual_seed(1)
    x = torch.randn(3, 5, 16, requires_grad=True)
    with Operators() as forward:
        loss = module(x).square().sum()
    with Operators() as backward:
        loss.backward()
    return forward, backward, [x.grad, *(param.grad for param in module.parameters())]


@pytest.mark.parametrize('save', CONFIGS)
def test_a_recompute_runs_no_kept_operator_again(save: str) -> None:
    forward, plain, wanted = run(layer())
    _, backward, found = run(layer(save))
    assert all(map(torch.equal, found, wanted))
    products = forward.of(*SAVED_OPERATORS)
    assert products == 5  # qkv, attention, out, and two of the FFN
    again = backward.of(*SAVED_OPERATORS) - plain.of(*SAVED_OPERATORS)
    norms = backward.of(ATEN.native_layer_norm.default)
    assert (again, norms) == dict(inputs=(products, 2), matmuls=(0, 2), all=(0, 0))[save]


def held_after_forward(save: str) -> int:
    module, x = layer(save), torch.randn(3, 5, 16, requires_grad=True)
    with Operators() as operators:
        loss = module(x).square().sum()
    held = operators.held()
    loss.backward()
    return held


def test_bytes_between_forward_and_backward() -> None:
    held = {save: held_after_forward(save) for save in ('', *CONFIGS)}
    x = 3 * 5 * 16 * 4
    # qkv, attention with a number for each head and query, out, and two of the FFN, the first of which is wider.
    products = 3 * x + (x + 3 * 5 * 2 * 4) + x + 2 * x + x
    assert held['matmuls'] == held['inputs'] + products
    assert held['inputs'] == x + 4  # for the square, and the loss
    assert held['all'] == held[''] > held['matmuls']


@pytest.mark.parametrize('dropout', [0.0, 0.1])
def test_attention_that_drops_out_runs_again(dropout: float) -> None:
    """Were it skipped, dropout after it would draw what the forward drew in it. On a CPU no such operator drops out."""
    for name in ('flash', 'efficient', 'cudnn'):
        operator = getattr(ATEN, f'_scaled_dot_product_{name}_attention').default
        given: dict = dict(dropout_p=dropout)
        index = [argument.name for argument in operator._schema.arguments].index('dropout_p')
        wanted = CheckpointPolicy.PREFER_RECOMPUTE if dropout else CheckpointPolicy.MUST_SAVE
        assert _policy(None, operator, **given) == wanted
        assert _policy(None, operator, *[None] * index, dropout) == wanted
    assert _policy(None, ATEN.mm.default, 1, 2) == CheckpointPolicy.MUST_SAVE


class InPlace(nn.Module):
    """Writes into the output of a product."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16)
        self.functional = functional

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(x)
        hidden = self.up(x)
        hidden = nn.functional.relu(hidden, inplace=True) if self.functional else self.act(hidden)
        return x + self.down(hidden)


IN_PLACE = [('inputs', False), ('matmuls', False), ('matmuls', True)]


@pytest.mark.parametrize('early_stop', [True, False])
@pytest.mark.parametrize('save, functional', IN_PLACE)
def test_in_place_at_the_start_and_after_products(save: str, functional: bool, early_stop: bool) -> None:
    """A module that is called on what it may overwrite, and does; its caller does so, too."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 16), InPlace(functional), nn.Linear(16, 16), nn.ReLU(inplace=True))
    patched = copy.deepcopy(plain)
    undos = [checkpoint_module(patched[i], replace(CONFIGS[save], early_stop=early_stop))[1] for i in (1, 2)]
    x = torch.randn(3, 16)
    for model in (plain, patched):
        model(x).square().sum().backward()
    pairs = zip(plain.parameters(), patched.parameters(), strict=True)
    assert all(torch.equal(mine.grad, theirs.grad) for mine, theirs in pairs)
    for undo in undos:
        undo()
    assert patched[1].act.inplace


def test_what_was_overwritten_runs_again_alone() -> None:
    module = InPlace(True)
    checkpoint_module(module, CONFIGS['matmuls'])
    _, backward, _ = run(module)
    # Two products of two layers each; the first layer's is overwritten.
    assert backward.of(*SAVED_OPERATORS) == 4 + 1
