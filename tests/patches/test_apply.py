"""Patches on a model: what is asked for is found, all of it or an error."""

import pytest
import torch
from torch import nn

from mmzero.config import CheckpointingConfig
from mmzero.errors import PlanError
from mmzero.patches import apply_patches


class OwnBlock(nn.Module):
    """A block that checkpoints itself and that no patch is registered for."""

    def __init__(self, with_cp):
        super().__init__()
        self.with_cp = with_cp
        self.layer = nn.Linear(2, 2)


def patched(model):
    """Paths of the modules whose forward is replaced."""
    return [name for name, module in model.named_modules() if 'forward' in vars(module)]


def test_named_modules(net, twin, same_step):
    applied = apply_patches(net, CheckpointingConfig(modules=['blocks.1', 'stem']))
    assert patched(net) == ['stem', 'blocks.1']
    assert applied.counts == dict(Linear=1, Block=1)
    assert str(applied) == '1 x Block, 1 x Linear'
    same_step(twin, net)


def test_nothing_asked_for(net):
    applied = apply_patches(net)
    assert patched(net) == []
    assert (str(applied), applied.left) == ('nothing', ())


def test_undo(net, twin):
    before = {name: dict(vars(module)) for name, module in net.named_modules()}
    applied = apply_patches(net, CheckpointingConfig(modules=['blocks.0', 'blocks.0.up']))
    assert patched(net) == ['blocks.0', 'blocks.0.up']
    applied.undo()
    assert {name: dict(vars(module)) for name, module in net.named_modules()} == before
    applied.undo()  # nothing is left to take back


def test_tree_and_names_stay(net, twin):
    apply_patches(net, CheckpointingConfig(modules=['blocks.0', 'blocks.0.up']))
    assert list(net.state_dict()) == list(twin.state_dict())
    assert str(net) == str(twin)


@pytest.mark.parametrize(
    ('name', 'said'),
    [
        ('block.1', "Net has no module 'block.1'; did you mean 'blocks.1'"),
        ('qqqqqqq', "Net has no module 'qqqqqqq'; known are: blocks, blocks.0"),
        ('', "Net has no module ''"),
    ],
)
def test_name_that_is_not_there(net, name, said):
    with pytest.raises(PlanError, match=f'activation_checkpointing: {said}'):
        apply_patches(net, CheckpointingConfig(modules=['blocks.0', name]))
    assert patched(net) == []


def test_forward_that_was_replaced_is_refused_and_nothing_stays_patched(net):
    net.blocks[1].forward = lambda x: x
    with pytest.raises(PlanError, match="'blocks.1': forward of this Block was replaced"):
        apply_patches(net, CheckpointingConfig(modules=['blocks.0', 'blocks.1']))
    assert patched(net) == ['blocks.1']


def test_block_without_a_patch_is_reported():
    model = nn.Sequential(OwnBlock(True), OwnBlock(True), OwnBlock(False))
    model.with_cp = True  # as backbones have it; only their blocks act on it
    applied = apply_patches(model)
    assert applied.left == ('OwnBlock',)
    assert patched(model) == []
    assert [block.with_cp for block in model] == [True, True, False]


def test_block_with_cp_off_is_not_reported():
    assert apply_patches(nn.Sequential(OwnBlock(False))).left == ()


def test_model_on_meta():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).to('meta')
    assert apply_patches(model, CheckpointingConfig(modules=['0'])).counts == dict(Linear=1)
    assert model(torch.empty(3, 2, device='meta')).shape == (3, 2)
