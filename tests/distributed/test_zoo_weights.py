"""mmpretrain's models resize weights of other image and window sizes by their own hooks, at every stage."""

import os
from typing import Any

import pytest
from scipy import interpolate

from tests.distributed.cases import Faults, merged
from tests.distributed.ranks import run_ranks
from tests.distributed.resizing import resizes_alike
from tests.patches.zoo.packages import models_of

pytestmark = [pytest.mark.distributed, pytest.mark.zoo]

models_of('mmpretrain')

STAGES = (0, 3)
LOSS = dict(type='mmpretrain.CrossEntropyLoss')
PREPROCESSOR = dict(type='mmpretrain.ClsDataPreprocessor')


def swin(window: int) -> dict:
    arch = dict(embed_dims=12, depths=[1, 1, 1, 1], num_heads=[2, 2, 2, 2])
    return dict(
        type='mmpretrain.ImageClassifier',
        data_preprocessor=PREPROCESSOR,
        backbone=dict(type='mmpretrain.SwinTransformer', arch=arch, img_size=64, window_size=window),
        head=dict(type='mmpretrain.LinearClsHead', num_classes=3, in_channels=96, loss=LOSS),
    )


def vit(size: int) -> dict:
    arch = dict(embed_dims=12, num_layers=1, num_heads=2, feedforward_channels=12)
    return dict(
        type='mmpretrain.ImageClassifier',
        data_preprocessor=PREPROCESSOR,
        backbone=dict(type='mmpretrain.VisionTransformer', arch=arch, img_size=size, patch_size=8),
        head=dict(type='mmpretrain.LinearClsHead', num_classes=3, in_channels=12, loss=LOSS),
    )


TIMM = dict(
    type='mmpretrain.TimmClassifier', data_preprocessor=PREPROCESSOR, model_name='resnet10t', num_classes=3, loss=LOSS
)
MODELS: dict[str, tuple[dict, dict]] = {
    'Swin': (swin(2), swin(4)),
    'ViT': (vit(32), vit(48)),
    # It saves under the names of timm.
    'timm': (TIMM, TIMM),
}


def interp2d(x: Any, y: Any, z: Any, kind: str) -> Any:
    """What scipy names in the place of its function of this name, which mmpretrain calls and scipy 1.14 lost."""
    spline = interpolate.RectBivariateSpline(x, y, z.T)
    return lambda dx, dy: spline(dx, dy).T


def run_cases(folder: str) -> Faults:
    models_of('mmpretrain')
    interpolate.interp2d = interp2d
    found = {}
    for name, (model, source) in MODELS.items():
        for stage in STAGES:
            os.makedirs(f'{folder}/{name} {stage}', exist_ok=True)
            found[f'{name} {stage}'] = resizes_alike(f'{folder}/{name} {stage}', stage, model, source)
    return found


@pytest.fixture(scope='module')
def found(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return merged(run_ranks(2, run_cases, str(tmp_path_factory.mktemp('zoo'))))


@pytest.mark.parametrize('stage', STAGES)
@pytest.mark.parametrize('name', MODELS)
def test_weights_of_another_size(found: Faults, name: str, stage: int) -> None:
    assert not found[f'{name} {stage}'], '\n'.join(found[f'{name} {stage}'])
