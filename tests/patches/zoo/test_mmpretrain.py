"""Each block of mmpretrain that checkpoints itself computes what it does without, non-re-entrantly."""

from typing import Any

import pytest
import torch
from mmengine.registry import MODELS, DefaultScope
from torch import nn

from tests.patches.families import check_same_step
from tests.patches.zoo.packages import models_of

pytestmark = pytest.mark.zoo

models_of('mmpretrain')

STAGES = dict(base_channels=8, num_stages=2, out_indices=(1,), strides=(1, 2), dilations=(1, 1))
SWIN = dict(embed_dims=16, depths=[1, 1, 2, 1], num_heads=[2, 2, 2, 2])
CASES: dict[str, tuple[dict, dict[str, int]]] = {
    'ConvNeXt': (
        dict(type='ConvNeXt', arch=dict(depths=[1, 1, 2, 1], channels=[8, 16, 16, 16]), drop_path_rate=0.5),
        dict(ConvNeXtBlock=5),
    ),
    'DaViT': (
        dict(type='DaViT', arch=dict(embed_dims=16, depths=[1, 1, 1, 1], num_heads=[2, 2, 2, 2]), window_size=2),
        # Its own with_cp does not reach the channel blocks.
        dict(SpatialBlock=4),
    ),
    'DenseNet': (
        dict(type='DenseNet', arch=dict(growth_rate=4, depths=[2, 2], init_channels=8), drop_rate=0.5),
        dict(DenseLayer=4),
    ),
    'EfficientNet': (dict(type='EfficientNet', arch='b0'), dict(InvertedResidual=16)),
    'EfficientNet-EdgeTPU': (dict(type='EfficientNet', arch='es'), dict(EdgeResidual=7, InvertedResidual=11)),
    'HorNet': (
        dict(type='HorNet', arch='tiny', drop_path_rate=0.5),
        dict(HorNetBlock=25),
    ),
    'MixMIM': (
        dict(type='MixMIMTransformer', arch=dict(SWIN), img_size=64, window_size=[2, 2, 2, 2], drop_path_rate=0.5),
        dict(MixMIMBlock=5),
    ),
    'MobileNetV2': (dict(type='MobileNetV2', widen_factor=0.25), dict(InvertedResidual=17)),
    'MobileNetV3': (dict(type='MobileNetV3', arch='small'), dict(InvertedResidual=11)),
    'RegNet': (dict(type='RegNet', arch='regnetx_400mf'), dict(Bottleneck=22)),
    'RepLKNet': (dict(type='RepLKNet', arch='31B', drop_path_rate=0.5), dict(ConvFFN=24, RepLKBlock=24, Sequential=3)),
    'RepVGG': (dict(type='RepVGG', arch='A0', out_indices=(0, 1)), dict(RepVGGBlock=22)),
    'Res2Net': (dict(type='Res2Net', depth=50, scales=4, base_width=4, **STAGES), dict(Bottle2neck=7)),
    'ResNeSt': (dict(type='ResNeSt', depth=50, stem_channels=8, radix=2, **STAGES), dict(Bottleneck=7)),
    'ResNet-18': (dict(type='ResNet', depth=18, **STAGES), dict(BasicBlock=4)),
    'ResNet-50': (dict(type='ResNet', depth=50, **STAGES), dict(Bottleneck=7)),
    'SE-ResNet': (dict(type='SEResNet', depth=50, se_ratio=4, **STAGES), dict(SEBottleneck=7)),
    'ShuffleNetV1': (dict(type='ShuffleNetV1', groups=3), dict(ShuffleUnit=16)),
    'ShuffleNetV2': (dict(type='ShuffleNetV2', widen_factor=0.5), dict(InvertedResidual=16)),
    'Swin': (dict(type='SwinTransformer', arch=dict(SWIN), img_size=64, window_size=2), dict(SwinBlock=5)),
    'SwinV2': (
        dict(type='SwinTransformerV2', arch=dict(SWIN, extra_norm_every_n_blocks=0), img_size=64, window_size=2),
        dict(SwinBlockV2=5),
    ),
    'TinyViT': (
        dict(type='TinyViT', arch='5m', img_size=(64, 64), window_size=[2, 2, 2, 2], drop_path_rate=0.5),
        dict(MBConvBlock=2, TinyViTBlock=10),
    ),
}
# Spellings other than with_cp.
SWITCHES = dict(DenseNet='memory_efficient', MixMIM='use_checkpoint', TinyViT='use_checkpoint')
SLOW = ('HorNet', 'RepLKNet')


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    cfg = dict(CASES[name][0], **{SWITCHES.get(name, 'with_cp'): True})
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = MODELS.build(cfg)
    for param in model.parameters():
        nn.init.normal_(param, std=0.1)
    model.train()
    return model


def run(model: nn.Module) -> Any:
    return model(torch.randn(2, 3, 64, 64))


@pytest.mark.parametrize('name', [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES])
def test_same_step(name: str) -> None:
    applied = check_same_step(build(name), run)
    assert applied.counts == CASES[name][1]


def test_sparse_convnext() -> None:
    """Its block reads a mask that SparK sets for all of them before each forward."""
    from mmpretrain.models.utils.sparse_modules import SparseHelper

    SparseHelper._cur_active = torch.tensor([[1, 0], [0, 1]], dtype=torch.bool).expand(2, 1, 2, 2)
    cfg = dict(CASES['ConvNeXt'][0], type='SparseConvNeXt', with_cp=True)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = MODELS.build(cfg)
    model.train()
    assert check_same_step(model, run).counts == dict(SparseConvNeXtBlock=5)
