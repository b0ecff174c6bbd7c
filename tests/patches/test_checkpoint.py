"""One module's activation checkpointing: same numbers, less memory, nothing else changed."""

import copy
import warnings

import pytest
import torch
from torch import nn

from mmzero.patches import checkpoint_module


@pytest.mark.parametrize('autocast', [False, True])
@pytest.mark.parametrize('paths', [['blocks.0'], ['blocks.1'], ['blocks.0', 'blocks.1', 'stem']])
def test_bitwise_equal(net, twin, same_step, paths, autocast):
    for path in paths:
        checkpoint_module(net.get_submodule(path))
    same_step(twin, net, autocast)


def test_nested_bitwise_equal(net, twin, same_step):
    for path in ['blocks.1.up', 'blocks.1.norm', 'blocks.1']:
        checkpoint_module(net.get_submodule(path))
    same_step(twin, net)


def test_frozen_inside_bitwise_equal(net, twin):
    checkpoint_module(net.blocks[0])
    x = torch.randn(4, 8)
    for model in (net, twin):
        model.blocks[0].up.requires_grad_(False)
        torch.manual_seed(0)
        model.blocks[0](x).sum().backward()
    assert net.blocks[0].up.weight.grad is None
    assert torch.equal(net.blocks[0].down.weight.grad, twin.blocks[0].down.weight.grad)


@pytest.mark.parametrize(
    'norm',
    [
        nn.BatchNorm1d(8),
        nn.BatchNorm1d(8, momentum=None),
        nn.InstanceNorm1d(8, affine=True, track_running_stats=True),
    ],
    ids=['batch', 'average', 'instance'],
)
def test_running_statistics_count_each_batch_once(norm):
    plain, patched = nn.Sequential(norm), nn.Sequential(copy.deepcopy(norm))
    checkpoint_module(patched)
    mean = patched[0].running_mean
    for _ in range(2):
        x = torch.randn(4, 8, 3)
        for model in (plain, patched):
            model(x).square().sum().backward()
        for name, buffer in plain.named_buffers():
            assert torch.equal(patched.get_buffer(name), buffer), name
    assert patched[0].running_mean is mean


def test_runs_again_in_backward(net):
    checkpoint_module(net.blocks[0])
    loss = net(torch.randn(4, 8)).sum()
    assert [block.calls for block in net.blocks] == [1, 2]
    loss.backward()
    assert [block.calls for block in net.blocks] == [2, 2]


def test_keeps_inputs_instead_of_activations(net):
    def saved_bytes():
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: sizes.append(tensor.nbytes), lambda _: None):
            net.blocks[0](torch.randn(4, 8))
        return sum(sizes)

    before = saved_bytes()
    checkpoint_module(net.blocks[0])
    assert saved_bytes() < before / 4


def test_does_not_run_again_without_gradients(net):
    checkpoint_module(net.blocks[0])
    with torch.no_grad():
        net(torch.randn(4, 8))
    assert net.blocks[0].calls == 1


def test_deep_copy_runs_its_own_weights(net):
    checkpoint_module(net.blocks[0])
    other = copy.deepcopy(net).eval()
    x = torch.randn(4, 8)
    for param in other.blocks[0].parameters():
        nn.init.zeros_(param)
    assert torch.equal(other.blocks[0](x), torch.zeros(4, 8))
    other.blocks[0](x).sum().backward()
    assert other.blocks[0].calls == 3
    assert net.blocks[0].calls == 0
    assert all(param.grad is None for param in net.parameters())


def test_tree_names_and_class_stay(net, twin):
    checkpoint_module(net.blocks[0])
    assert type(net.blocks[0]) is type(twin.blocks[0])
    assert list(net.state_dict()) == list(twin.state_dict())
    assert [(n, type(m)) for n, m in net.named_modules()] == [(n, type(m)) for n, m in twin.named_modules()]


def test_class_that_is_replaced_later_is_used(net):
    checkpoint_module(net.blocks[0])

    class Sharded(type(net.blocks[0])):
        def forward(self, x, **kwargs):
            return super().forward(x, **kwargs) * 0

    # As fully_shard does.
    net.blocks[0].__class__ = Sharded
    assert net.blocks[0](torch.randn(4, 8)).abs().sum() == 0


def test_hooks_run_once(net):
    calls = []
    checkpoint_module(net.blocks[0])
    net.blocks[0].register_forward_hook(lambda *args: calls.append('forward'))
    net.blocks[0].register_full_backward_hook(lambda *args: calls.append('backward'))
    net(torch.randn(4, 8)).sum().backward()
    assert calls == ['forward', 'backward']


def test_undo_restores_exactly(net):
    block = net.blocks[0]
    before = dict(vars(block))
    _, undo = checkpoint_module(block)
    assert vars(block) != before
    undo()
    assert vars(block) == before
    net(torch.randn(4, 8)).sum().backward()
    assert block.calls == 1


def test_forward_that_was_replaced_is_refused(net):
    net.blocks[0].forward = lambda x: x
    with pytest.raises(ValueError, match='forward of this Block was replaced on the instance'):
        checkpoint_module(net.blocks[0])


def test_twice_is_refused(net):
    checkpoint_module(net.blocks[0])
    with pytest.raises(ValueError, match='was replaced on the instance already'):
        checkpoint_module(net.blocks[0])


def test_torch_warns_of_nothing(net):
    checkpoint_module(net.blocks[0])
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        net(torch.randn(4, 8)).sum().backward()
