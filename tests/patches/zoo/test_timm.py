"""Models of timm with ``set_grad_checkpointing()``: their blocks are regions, with the same step."""

import copy

import pytest
import torch
from torch import nn

from mmzero.config import CheckpointingConfig
from mmzero.patches import apply_patches
from tests.patches.families import check_same_step
from tests.patches.zoo.packages import models_of

pytestmark = pytest.mark.zoo

models_of('timm')

VIT = dict(depth=3, embed_dim=32, num_heads=2, img_size=64, proj_drop_rate=0.3, drop_path_rate=0.3)
CASES: dict[str, tuple[str, dict, int]] = {
    'ViT': ('vit_tiny_patch16_224', VIT, 3),
    'Beit': ('beit_base_patch16_224', dict(VIT), 3),
    'Cait': ('cait_xxs24_224', dict(depth=3, embed_dim=32, num_heads=2, img_size=64), 3),
    'ConvNeXt': ('convnext_atto', dict(drop_path_rate=0.3), 12),
    # Its stages have the switch, too, and their blocks are what is recomputed.
    'DaViT': ('davit_tiny', dict(embed_dims=(16, 16, 16, 16), num_heads=(2, 2, 2, 2)), 6),
    'EfficientNet': ('efficientnet_b0', dict(drop_rate=0.3, drop_path_rate=0.3), 16),
    'EfficientViT': ('efficientvit_b0', {}, 4),
    'FastViT': ('fastvit_t8', {}, 10),
    'MobileNetV3': ('mobilenetv3_small_050', {}, 12),
    'PoolFormer': ('poolformer_s12', {}, 12),
    'RegNet': ('regnetx_002', dict(drop_path_rate=0.3), 13),
    'ResNet': ('resnet18', dict(drop_path_rate=0.3), 8),
    'Swin': (
        'swin_tiny_patch4_window7_224',
        dict(img_size=64, window_size=2, embed_dim=16, num_heads=(2, 2, 2, 2), depths=(1, 1, 2, 1)),
        5,
    ),
}


# One of each other class that recomputes, with the image size that it needs.
SMALL = (
    'convmixer_768_32 edgenext_xx_small efficientvit_m0 fasternet_t0 ghostnet_100 hgnetv2_b0 '
    'inception_next_atto mambaout_femto nextvit_small nfnet_l0 pvt_v2_b0 rdnet_tiny repghostnet_050 repvgg_a0 '
    'repvit_m0_9 resnetv2_50 rexnet_100 shvit_s1 starnet_s1 swiftformer_xs tresnet_m ese_vovnet19b_dw xception41 '
    'dpn48b mobilenetv4_conv_small'
)
LARGE = (
    'efficientformer_l1 efficientformerv2_s0 eva02_tiny_patch14_224 focalnet_tiny_srf gcvit_xxtiny hiera_tiny_224 '
    'levit_128s mixer_s32_224 mvitv2_tiny nest_tiny swinv2_cr_tiny_224 tiny_vit_5m_224 tnt_s_patch16_224 '
    'visformer_tiny vit_relpos_small_patch16_224 volo_d1_224 xcit_nano_12_p16_224 vitamin_small_224'
)
OTHERS = dict.fromkeys(SMALL.split(), 64) | dict.fromkeys(LARGE.split(), 224)
OTHERS.update(maxvit_rmlp_pico_rw_256=256, swinv2_tiny_window8_256=256)


def build(name: str, **options: object) -> nn.Module:
    import timm

    torch.manual_seed(0)
    return timm.create_model(name, **options).train()


def images(size: int = 64) -> torch.Tensor:
    return torch.randn(2, 3, size, size)


@pytest.mark.parametrize('case', CASES)
def test_its_own_checkpointing(case: str) -> None:
    name, options, count = CASES[case]
    model = build(name, num_classes=3, **options)
    plain = copy.deepcopy(model)
    model.set_grad_checkpointing()
    applied = check_same_step(model, lambda model: model(images()), plain=plain)
    assert len(applied.regions) == count
    # RegNet sets it on an Identity, too.
    rest = [module for module in model.modules() if getattr(module, 'grad_checkpointing', False)]
    assert not [module for module in rest if list(module.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize('name', OTHERS)
def test_others(name: str) -> None:
    model = build(name, num_classes=3)
    plain = copy.deepcopy(model)
    model.set_grad_checkpointing()
    assert check_same_step(model, lambda model: model(images(OTHERS[name])), plain=plain).regions


@pytest.mark.parametrize('name', ['resnet18', 'efficientnet_b0', 'vit_tiny_patch16_224'])
def test_features_only(name: str) -> None:
    options = dict(VIT) if name.startswith('vit') else {}
    model = build(name, features_only=True, **options)
    plain = copy.deepcopy(model)
    getattr(model, 'model', model).set_grad_checkpointing()
    assert check_same_step(model, lambda model: model(images()), plain=plain).counts


def test_memory_efficient_densenet() -> None:
    model = build('densenet121', num_classes=3, growth_rate=4, block_config=(2, 2), memory_efficient=True)
    assert check_same_step(model, lambda model: model(images())).counts == dict(DenseLayer=4)


def test_blocks_by_name() -> None:
    model = build('vit_tiny_patch16_224', num_classes=3, **VIT)
    applied = check_same_step(
        model, lambda model: model(images()), CheckpointingConfig(modules=('blocks.0', 'blocks.2'))
    )
    assert list(applied.regions) == ['blocks.0', 'blocks.2']


def test_undo() -> None:
    model = build('davit_tiny', embed_dims=(16, 16, 16, 16), num_heads=(2, 2, 2, 2))
    model.set_grad_checkpointing()
    before = [module.grad_checkpointing for module in model.modules() if hasattr(module, 'grad_checkpointing')]
    apply_patches(model).undo()
    after = [module.grad_checkpointing for module in model.modules() if hasattr(module, 'grad_checkpointing')]
    assert before == after and all(after)
