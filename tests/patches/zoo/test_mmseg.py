"""Each block of mmseg that checkpoints itself computes what it does without, non-re-entrantly."""

import pytest
import torch
from mmengine.registry import MODELS, DefaultScope
from torch import nn

from tests.patches.families import check_same_step
from tests.patches.zoo.packages import models_of

pytestmark = pytest.mark.zoo

models_of('mmseg')

STAGES = dict(base_channels=8, num_stages=2, out_indices=(0, 1), strides=(1, 2), dilations=(1, 1))
UNET = dict(
    base_channels=4, num_stages=2, strides=(1, 1), enc_num_convs=(2, 2), dec_num_convs=(2,), downsamples=(True,)
)
UNET.update(enc_dilations=(1, 1), dec_dilations=(1,))
DROPS = dict(drop_rate=0.3, attn_drop_rate=0.3, drop_path_rate=0.3)
CASES: dict[str, tuple[dict, dict[str, int]]] = {
    'CGNet': (
        dict(type='CGNet', num_channels=(8, 16, 32), num_blocks=(1, 2)),
        dict(ContextGuidedBlock=3, GlobalContextExtractor=3),
    ),
    'MiT': (
        dict(type='MixVisionTransformer', embed_dims=8, num_layers=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], **DROPS),
        dict(TransformerEncoderLayer=4),
    ),
    'MobileNetV2': (dict(type='MobileNetV2', widen_factor=0.25), dict(InvertedResidual=17)),
    'MobileNetV3': (dict(type='MobileNetV3', arch='small', out_indices=(12,)), dict(InvertedResidualV3=11)),
    'ResNeSt': (dict(type='ResNeSt', depth=50, stem_channels=8, radix=2, **STAGES), dict(Bottleneck=7)),
    'ResNet-18': (dict(type='ResNet', depth=18, **STAGES), dict(BasicBlock=4)),
    'ResNetV1c-50': (dict(type='ResNetV1c', depth=50, stem_channels=8, **STAGES), dict(Bottleneck=7)),
    'Swin': (
        dict(type='SwinTransformer', pretrain_img_size=64, embed_dims=16, depths=(1, 2), num_heads=(2, 2))
        | dict(strides=(4, 2), out_indices=(0, 1), window_size=4, drop_path_rate=0.5),
        dict(SwinBlock=3),
    ),
    'UNet': (dict(type='UNet', **UNET), dict(BasicConvBlock=3, InterpConv=1)),
    'UNet with deconvolutions': (
        dict(type='UNet', upsample_cfg=dict(type='DeconvModule'), **UNET),
        dict(BasicConvBlock=3, DeconvModule=1),
    ),
    'ViT': (
        dict(type='VisionTransformer', img_size=64, embed_dims=16, num_layers=3, num_heads=2, **DROPS),
        dict(TransformerEncoderLayer=3),
    ),
}


@pytest.mark.parametrize('name', CASES)
def test_same_step(name: str) -> None:
    cfg, counts = CASES[name]
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = MODELS.build(dict(cfg, with_cp=True))
    for param in model.parameters():
        nn.init.normal_(param, std=0.1)
    model.train()
    applied = check_same_step(model, lambda model: model(torch.randn(2, 3, 64, 64)))
    assert applied.counts == counts
