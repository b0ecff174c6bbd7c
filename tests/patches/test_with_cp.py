"""mmdet's blocks with ``with_cp=True`` are found by name and no longer checkpoint re-entrantly."""

import copy
import warnings

import pytest
import torch

import mmzero  # noqa: F401
from mmzero.config import CheckpointingConfig
from mmzero.patches import CheckpointPatch, apply_patches
from mmzero.registry import CHECKPOINT_PATCHES

pytest.importorskip('mmdet')

SWIN = dict(
    type='mmdet.SwinTransformer',
    embed_dims=16,
    depths=(2, 1),
    num_heads=(2, 2),
    strides=(4, 2),
    out_indices=(0, 1),
    window_size=4,
    mlp_ratio=2,
    drop_path_rate=0.5,
)
RESNET = dict(type='mmdet.ResNet', base_channels=4, num_stages=2, out_indices=(0, 1))
RESNET.update(strides=(1, 2), dilations=(1, 1))
BACKBONES = [
    (SWIN, 'SwinBlock', 3),
    (dict(RESNET, depth=18), 'BasicBlock', 4),
    (dict(RESNET, depth=50), 'Bottleneck', 7),
]


def build(cfg, with_cp=True):
    """Build a backbone."""
    import mmdet.models  # noqa: F401
    from mmengine.registry import MODELS

    torch.manual_seed(0)
    model = MODELS.build(dict(cfg, with_cp=with_cp))
    model.init_weights()
    model.train()
    return model


def step(model):
    """Losses, gradients and running statistics of a step with its random state."""
    torch.manual_seed(1)
    images = torch.randn(2, 3, 32, 32, requires_grad=True)
    sum(out.square().mean() for out in model(images)).backward()
    found = {name: param.grad for name, param in model.named_parameters()}
    return dict(found, images=images.grad, **dict(model.named_buffers()))


@pytest.fixture(params=BACKBONES, ids=[name for _, name, _ in BACKBONES])
def backbone(request):
    """Config, block class and number of blocks."""
    return request.param


def blocks_of(model, name):
    """The blocks of a class."""
    return [module for module in model.modules() if type(module).__name__ == name]


def test_blocks_are_found(backbone):
    cfg, name, count = backbone
    model = build(cfg)
    applied = apply_patches(model)
    assert applied.counts == {name: count}
    assert applied.left == ()
    blocks = blocks_of(model, name)
    assert all('forward' in vars(block) and not block.with_cp for block in blocks)


def test_with_cp_off_is_left_alone(backbone):
    cfg, name, _ = backbone
    model = build(cfg, with_cp=False)
    assert not apply_patches(model).counts
    assert not any('forward' in vars(module) for module in model.modules())


def test_equal_to_no_checkpointing_and_no_warning(backbone):
    cfg, name, _ = backbone
    model = build(cfg, with_cp=False)
    twin = copy.deepcopy(model)
    for block in blocks_of(model, name):
        block.with_cp = True
    apply_patches(model)
    with warnings.catch_warnings():
        # Re-entrant checkpointing warns of its age.
        warnings.simplefilter('error')
        found = step(model)
    for key, expected in step(twin).items():
        same = expected is None and found[key] is None
        assert same or torch.equal(found[key], expected), key


def test_undo(backbone):
    cfg, name, count = backbone
    model = build(cfg)
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    applied = apply_patches(model)
    applied.undo()
    assert {path: dict(vars(module)) for path, module in model.named_modules()} == before
    assert sum(block.with_cp for block in blocks_of(model, name)) == count


def test_named_block_is_patched_once():
    model = build(SWIN)
    path = next(p for p, m in model.named_modules() if type(m).__name__ == 'SwinBlock')
    assert apply_patches(model, CheckpointingConfig(modules=[path])).counts == dict(SwinBlock=3)


def test_named_block_with_cp_off_is_patched():
    model = build(SWIN, with_cp=False)
    path = next(p for p, m in model.named_modules() if type(m).__name__ == 'SwinBlock')
    assert apply_patches(model, CheckpointingConfig(modules=[path])).counts == dict(SwinBlock=1)


def test_subclass_is_found():
    model = build(SWIN)
    block = blocks_of(model, 'SwinBlock')[0]
    block.__class__ = type('MyBlock', (type(block),), {})
    assert apply_patches(model).counts == dict(MyBlock=1, SwinBlock=2)


def test_project_registers_its_own_patch():
    model = build(SWIN)
    block = blocks_of(model, 'SwinBlock')[0]
    block.__class__ = type('OurBlock', (type(block),), {})

    class OurPatch(CheckpointPatch):
        def asks_for(self, module):
            return (module.ffn,)

    # Nearer than SwinBlock's.
    CHECKPOINT_PATCHES.register_module(name='OurBlock', module=OurPatch)
    try:
        assert apply_patches(model).counts == dict(SwinBlock=2, FFN=1)
    finally:
        del CHECKPOINT_PATCHES.module_dict['OurBlock']
