"""Each block of mmdet and mmcv with ``with_cp=True`` computes what it does without, non-re-entrantly."""

from typing import Any

import pytest
import torch
from torch import nn

import mmzero  # noqa: F401
from tests.patches.families import check_same_step

pytest.importorskip('mmdet')

STAGES = dict(base_channels=8, num_stages=2, out_indices=(0, 1), strides=(1, 2), dilations=(1, 1))
SWIN = dict(embed_dims=16, depths=(2, 1), num_heads=(2, 2), strides=(4, 2), out_indices=(0, 1), window_size=4)


def branches(number: int, block: str = 'BASIC') -> dict:
    """A stage of HRNet."""
    channels = tuple(4 * 2**index for index in range(number))
    return dict(num_modules=1, num_branches=number, block=block, num_blocks=(1,) * number, num_channels=channels)


HRNET = {f'stage{number}': branches(number, 'BASIC' if number > 1 else 'BOTTLENECK') for number in (1, 2, 3, 4)}
CASES: dict[str, tuple[dict, dict[str, int]]] = {
    'Swin': (dict(type='SwinTransformer', drop_path_rate=0.5, **SWIN), dict(SwinBlock=3)),
    'ResNet-18': (dict(type='ResNet', depth=18, **STAGES), dict(BasicBlock=4)),
    'ResNet-50': (dict(type='ResNet', depth=50, **STAGES), dict(Bottleneck=7)),
    'ResNeXt': (dict(type='ResNeXt', depth=50, groups=4, base_width=4, **STAGES), dict(Bottleneck=7)),
    'RegNet': (dict(type='RegNet', arch='regnetx_400mf', out_indices=(0, 1)), dict(Bottleneck=22)),
    'Res2Net': (dict(type='Res2Net', depth=50, scales=4, base_width=4, **STAGES), dict(Bottle2neck=7)),
    'ResNeSt': (dict(type='ResNeSt', depth=50, stem_channels=8, radix=2, **STAGES), dict(Bottleneck=7)),
    'HRNet': (dict(type='HRNet', extra=HRNET), dict(Bottleneck=1, BasicBlock=9)),
    'MobileNetV2': (dict(type='MobileNetV2', widen_factor=0.25, out_indices=(2, 4)), dict(InvertedResidual=17)),
    'EfficientNet': (dict(type='EfficientNet', arch='b0', out_indices=(3, 4)), dict(InvertedResidual=11)),
    'EfficientNet-EdgeTPU': (
        dict(type='EfficientNet', arch='es', out_indices=(4,)),
        dict(EdgeResidual=7, InvertedResidual=9),
    ),
    'TridentNet': (
        dict(type='TridentResNet', depth=50, trident_dilations=(1, 2, 3), num_branch=3, test_branch_idx=1)
        | dict(base_channels=8, num_stages=3, strides=(1, 2, 2), dilations=(1, 1, 1), out_indices=(2,)),
        dict(Bottleneck=7, TridentBottleneck=6),
    ),
}


def build(cfg: dict, **options: Any) -> nn.Module:
    """Build a module of mmdet in train mode, with weights from one seed."""
    import mmdet.models  # noqa: F401
    from mmengine.registry import MODELS, DefaultScope

    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmdet'):
        model = MODELS.build(dict(cfg, **options))
    for param in model.parameters():
        # Some of mmdet's are uninitialised memory (TridentConv's).
        nn.init.normal_(param, std=0.1)
    # Those of some backbones return nothing.
    model.train()
    return model


def images(size: int = 64) -> torch.Tensor:
    return torch.randn(2, 3, size, size)


@pytest.mark.parametrize('name', CASES)
def test_same_step(name: str) -> None:
    cfg, counts = CASES[name]
    applied = check_same_step(build(cfg, with_cp=True), lambda model: model(images()))
    assert applied.counts == counts


def test_second_door_of_detectors() -> None:
    """DetectoRS runs its backbone again, by ``rfp_forward``; that is recomputed, too."""
    cfg = dict(type='DetectoRS_ResNet', depth=50, rfp_inplanes=4, output_img=True, **STAGES)

    def run(model: nn.Module) -> Any:
        image = images()
        first = model(image)
        return first[1:], model.rfp_forward(image, [None, torch.randn(2, 4, 8, 8)])

    model = build(cfg, with_cp=True)
    assert check_same_step(model, run).counts == dict(Bottleneck=7)
    block = model.layer1[0]
    seen = []
    block.conv1.register_forward_hook(lambda *args: seen.append(torch.is_grad_enabled()))
    out = block.rfp_forward(torch.randn(2, 8, 8, 8, requires_grad=True), None)
    assert len(seen) == 1
    out.sum().backward()
    assert len(seen) == 2


def test_neck_of_hrnet() -> None:
    def run(model: nn.Module) -> Any:
        return model([torch.randn(2, 4, 32, 32, requires_grad=True), torch.randn(2, 8, 16, 16, requires_grad=True)])

    model = build(dict(type='HRFPN', in_channels=[4, 8], out_channels=8, num_outs=3, with_cp=True))
    applied = check_same_step(model, run)
    assert list(applied.regions) == ['reduction_conv', 'fpn_convs.0', 'fpn_convs.1', 'fpn_convs.2']


def test_fusion_of_glip() -> None:
    from mmdet.models.utils.vlfuse_helper import VLFuse

    def run(model: nn.Module) -> Any:
        maps = [torch.randn(2, 8, size, size, requires_grad=True) for size in (4, 3, 2, 2, 1)]
        return model(dict(visual=maps, lang=dict(hidden=torch.randn(2, 5, 12), masks=torch.ones(2, 5))))

    torch.manual_seed(0)
    model = VLFuse(v_dim=8, l_dim=12, embed_dim=16, num_heads=2, dropout=0.5, use_checkpoint=True).train()
    assert list(check_same_step(model, run).regions) == ['b_attn']


def test_resnet_of_mmcv() -> None:
    from mmcv.cnn import ResNet

    torch.manual_seed(0)
    model = ResNet(50, num_stages=2, strides=(1, 2), dilations=(1, 1), out_indices=(1,), bn_eval=False, with_cp=True)
    model.train()
    assert check_same_step(model, lambda model: model(images(32))).counts == dict(Bottleneck=7)
