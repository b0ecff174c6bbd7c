"""A region in the ways that autograd, callers and torch.compile come to it."""

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks

from mmzero._compat import check_version, version_of
from mmzero.config import CheckpointingConfig
from mmzero.patches import Budget, KeptBytes, OffloadToHost, apply_patches, checkpoint_module

SAVES = ('inputs', 'matmuls')


class Mixer(nn.Module):
    """Takes and gives what modules of the field do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor, others: tuple = (), *, scales: Any = None, found: Any = None, kind: str = '') -> Any:
        self.calls += 1
        x = torch.tanh(self.linear(x))
        for other in others:
            x = x + other.tanh()
        x = x * scales['more'][0].exp() if scales else x
        if found is not None:
            found.append(x)
        return dict(x=x, kind=kind, parts=(x.sin(), None, [3]))


def pair(module: nn.Module, save: str = 'inputs', **config: Any) -> tuple[nn.Module, nn.Module]:
    """A module without and one with checkpointing."""
    patched = copy.deepcopy(module)
    checkpoint_module(patched, CheckpointingConfig(save=save, **config))
    return module, patched


def equal(found: list, wanted: list) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def inputs(count: int = 1) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(3, 4, requires_grad=True) for _ in range(count)]


@pytest.mark.parametrize('save', SAVES)
def test_arguments_and_results(save: str) -> None:
    """Tensors in tuples, dicts and lists by keyword get their gradients; what is no tensor passes as it is."""
    results = []
    for module in pair(Mixer(), save):
        x, first, second, scale = inputs(4)
        out = module(x, (first, second), scales=dict(more=[scale, 'no tensor']), kind='a')
        assert (out['kind'], out['parts'][1:]) == ('a', (None, [3]))
        (out['x'].square().sum() + out['parts'][0].sum()).backward()
        results.append([x.grad, first.grad, second.grad, scale.grad, *(param.grad for param in module.parameters())])
    assert equal(*results)
    assert module.calls == 2


@pytest.mark.parametrize('save', SAVES)
def test_what_forward_puts_into_a_container_is_there_once_and_has_gradients(save: str) -> None:
    results = []
    for module in pair(Mixer(), save):
        found: list[Tensor] = []
        out = module(*inputs(), found=found)['x']
        (out.sum() + found[0].square().sum()).backward()
        assert len(found) == 1 and found[0] is out
        results.append([param.grad for param in module.parameters()])
    assert equal(*results)


def test_a_region_without_anything_to_train_does_not_run_again() -> None:
    _, module = pair(Mixer().requires_grad_(False))
    assert not module(torch.randn(3, 4))['x'].requires_grad
    x = inputs()[0]
    module(x)['x'].sum().backward()
    assert module.calls == 3 and x.grad is not None


def both(module: nn.Module, run: Callable[[nn.Module, Tensor], list[Tensor]], save: str = 'inputs') -> bool:
    """Whether something comes out the same with and without checkpointing."""
    results = []
    for one in pair(module, save):
        torch.manual_seed(1)
        results.append(run(one, inputs()[0]))
    return equal(*results)


def small(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), *layers, nn.Dropout(0.5), nn.Linear(4, 4))


def test_backward_twice_through_one_graph() -> None:
    def run(module: nn.Module, x: Tensor) -> list[Tensor]:
        loss = module(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [x.grad, *(param.grad for param in module.parameters()), *module.buffers()]

    assert both(small(nn.BatchNorm1d(4)), run)


@pytest.mark.parametrize('save', SAVES)
def test_autograd_grad(save: str) -> None:
    def run(module: nn.Module, x: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()]))

    assert both(small(), run, save)


def test_gradients_of_gradients() -> None:
    def run(module: nn.Module, x: Tensor) -> list[Tensor]:
        grad = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)[0]
        grad.square().sum().backward()
        return [grad, x.grad, *(param.grad for param in module.parameters() if param.grad is not None)]

    assert both(small(), run)


@pytest.mark.parametrize('save', SAVES)
def test_gradients_in_eval_mode(save: str) -> None:
    def run(module: nn.Module, x: Tensor) -> list[Tensor]:
        module.eval()
        module(x).square().sum().backward()
        return [x.grad, *module.buffers()]

    assert both(small(nn.BatchNorm1d(4)), run, save)


@pytest.mark.parametrize('save', SAVES)
def test_running_statistics_count_once_whatever_is_kept(save: str) -> None:
    def run(module: nn.Module, x: Tensor) -> list[Tensor]:
        module(x).square().sum().backward()
        return [x.grad, *(param.grad for param in module.parameters()), *module.buffers()]

    assert both(small(nn.BatchNorm1d(4)), run, save)
    assert both(nn.Sequential(nn.BatchNorm1d(4)), run, save)


def test_debug_on_a_region_with_norms() -> None:
    _, module = pair(small(nn.BatchNorm1d(4)), debug=True)
    module(inputs()[0]).sum().backward()
    assert module[2].num_batches_tracked == 1


@pytest.mark.parametrize('layers', [(), (nn.BatchNorm1d(4),)], ids=['plain', 'norms'])
@pytest.mark.parametrize('save', SAVES)
def test_inputs_are_held_by_autograd_alone(save: str, layers: tuple) -> None:
    """What it saves may be put elsewhere, as by offloading."""
    before, (_, module) = nn.Linear(4, 4), pair(small(*layers), save)
    with saved_tensors_hooks(lambda tensor: tensor.detach().numpy().copy(), torch.from_numpy):
        x = before(torch.randn(3, 4))
        held, out = weakref.ref(x), module(x)
    del x
    gc.collect()
    assert held() is None
    out.sum().backward()


@pytest.mark.parametrize('save', SAVES)
@pytest.mark.parametrize('layers', [(), (nn.BatchNorm1d(4),)], ids=['plain', 'norms'])
def test_compiled_region_is_one_graph(save: str, layers: tuple) -> None:
    """torch.compile sees through a region: no graph break, the same gradients and statistics, the same names."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    layers = copy.deepcopy(layers)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*layers, nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)))
    patched = copy.deepcopy(plain)
    checkpoint_module(patched[1], CheckpointingConfig(save=save))
    patched[1].compile(backend='aot_eager')
    assert list(patched.state_dict()) == list(plain.state_dict())
    x = torch.randn(3, 4)
    for _ in range(2):
        for model in (plain, patched):
            model(x).square().sum().backward()
    assert not counters['graph_break'] and counters['stats']['unique_graphs'] == 1
    for mine, theirs in zip(patched.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-6)
    for mine, theirs in zip(patched.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


class Shift(nn.Module):
    """Has no use for its inputs in backward, but a recompute has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(300))

    def forward(self, x: Tensor, offset: Tensor) -> Tensor:
        return ((x + offset) * self.weight).sin()


@pytest.mark.parametrize('hooks', ['none', 'offload', 'counted', 'counted and offload'])
def test_an_input_that_its_caller_overwrites_is_told(hooks: str) -> None:
    """Hooks on saved tensors hide it from autograd, which would compute wrong gradients."""
    module = Shift()
    checkpoint_module(module, CheckpointingConfig(offload='cpu' if 'offload' in hooks else None))
    offset = torch.zeros(300, 300)
    with KeptBytes().counting() if 'counted' in hooks else nullcontext():
        out = module(torch.ones(300, 300), offset).sum()
    offset.add_(1)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        out.backward()


@pytest.mark.parametrize(
    'tensor', [torch.ones(3), torch.ones(3, dtype=torch.complex64).conj(), torch.ones(1).expand(3)]
)
def test_a_version_needs_no_memory(tensor: Tensor) -> None:
    version, before = version_of(tensor), tensor._version
    tensor[:1].detach().zero_()
    assert not version.untyped_storage().nbytes()
    with pytest.raises(RuntimeError, match='at version 1 instead of 0'):
        check_version(version, before)


class Sparse(nn.Module):
    """Gets a matrix that is not strided."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(300, 300)

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        return graph @ self.linear(x).tanh()


@pytest.mark.parametrize('layout', [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize('config', [dict(), dict(offload='cpu'), dict(offload='cpu', save='all')])
@pytest.mark.filterwarnings('ignore:Sparse')
def test_sparse_inputs(layout: torch.layout, config: dict) -> None:
    """They have no storage and no number of bytes; a budget counts neither."""
    graph, module = torch.eye(300).to_sparse(layout=layout), Sparse()
    regions = apply_patches(nn.Sequential(module), CheckpointingConfig(modules=('0',), **config)).regions
    budget = Budget(regions, 10**9, lambda own: [own], lambda *_: None)
    for _ in range(4):
        with budget.forward():
            loss = module(torch.ones(300, 300), graph).sum()
        loss.backward()
        budget.after_step()
    assert budget.choice is not None


def test_what_no_backward_comes_to_is_forgotten() -> None:
    host = OffloadToHost()
    stored: Any = [Mixer() for _ in range(3)]
    assert [host._place(one) for one in stored] == [0, 1, 2]
    del stored[1:]
    gc.collect()
    last: Any = Mixer()
    assert host._place(last) == 1
