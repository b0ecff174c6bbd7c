"""Compiled forwards beside activation checkpointing, without sharding."""

import copy
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from mmzero.config import CheckpointingConfig, CompileConfig
from mmzero.patches import Region, checkpoint_module, compile_alike
from tests.distributed.compiling import Broken
from tests.models import Layer

EAGER = CompileConfig(backend='eager', is_asked=True)


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def broken() -> Broken:
    torch.manual_seed(0)
    return Broken(4)


def images() -> torch.Tensor:
    return torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))


def region_of(module: nn.Module, **fields: str) -> dict[str, Region]:
    return {'it': checkpoint_module(module, CheckpointingConfig(**fields))[0]}


def train(module: nn.Module, steps: int = 2) -> list[torch.Tensor]:
    for _ in range(steps):
        module(images()).square().mean().backward()
    return [*module.buffers(), *(param.grad for param in module.parameters())]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_statistics_where_a_user_has_compiled_a_region_that_breaks() -> None:
    found, wanted = broken(), broken()
    checkpoint_module(found, CheckpointingConfig())
    found.compile(backend='eager')
    same(train(found), train(wanted))


@pytest.mark.parametrize('fields', [{}, dict(offload='cpu'), dict(save='all', offload='cpu'), dict(save='matmuls')])
def test_a_region_whose_graph_breaks(fields: dict) -> None:
    found, wanted = broken(), broken()
    compile_alike({'it': found}, EAGER, region_of(found, **fields))
    same(train(found), train(wanted))
    tried = counters['frames']['total']
    train(found)
    assert counters['frames']['total'] == tried
    # What keeps products would not see into what is compiled.
    assert bool(counters['stats']['unique_graphs']) == (fields.get('save') != 'matmuls')


def test_alike_modules_share_and_others_have_room_for_themselves() -> None:
    torch.manual_seed(0)
    for width in range(8, 104, 8):
        layers = {f'{width}.{index}': Layer(width, 4, False, 0.0) for index in range(2)}
        compile_alike(layers, EAGER, {}, number=width)
        for layer in layers.values():
            layer(torch.randn(1, 3, width))
    # Twelve kinds, which is more than torch keeps of one function.
    assert counters['stats']['unique_graphs'] == 12


def test_as_a_part_of_what_holds_it() -> None:
    layer = Layer(8, 4, False, 0.0)
    compile_alike({'ffn': layer.ffn}, EAGER, {})
    compile_alike({'it': layer}, EAGER, {}, number=1)
    layer(torch.randn(1, 3, 8))
    assert counters['stats']['unique_graphs'] == 1 and not counters['graph_break']


def test_a_deep_copy_runs_its_own_weights() -> None:
    layer, x = Layer(8, 4, False, 0.0), torch.randn(1, 3, 8)
    compile_alike({'it': layer}, EAGER, {})
    layer(x)
    copied = copy.deepcopy(layer)
    nn.init.zeros_(copied.ffn[2].weight)
    assert not torch.equal(copied(x), layer(x))


def test_a_forward_that_was_replaced_by_a_function() -> None:
    layer, x = Layer(8, 4, False, 0.0), torch.randn(1, 3, 8)
    wanted = layer(x)
    layer.forward = functools.partial(layer.forward)  # type: ignore[method-assign]
    compile_alike({'it': layer}, EAGER, {})
    assert torch.equal(layer(x), wanted) and counters['stats']['unique_graphs'] == 1


def test_an_error_of_the_model_stays_its_own() -> None:
    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > 1:
                raise KeyError('of the model')
            return x * 2

    module: Callable = Raises()
    compile_alike({'it': module}, EAGER, {})
    module(torch.ones(1))
    with pytest.raises(KeyError, match='of the model'):
        module(torch.ones(2))
