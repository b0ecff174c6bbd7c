"""Encoder and decoder layers of DETR's family, which get keyword arguments and masks, recomputed by name."""

import copy
from typing import Any

import pytest
from mmengine.hub import get_config
from torch import nn

import mmzero  # noqa: F401
from mmzero.config import CheckpointingConfig
from tests.patches.families import check_same_step

pytest.importorskip('mmdet')

CHANNELS = {512: 8, 1024: 16, 2048: 32, 256: 4}
CASES = {
    'detr/detr_r50_8xb2-150e_coco': 'DetrTransformerDecoderLayer',
    'deformable_detr/deformable-detr_r50_16xb2-50e_coco': 'DeformableDetrTransformerDecoderLayer',
    'dino/dino-4scale_r50_8xb2-12e_coco': 'DeformableDetrTransformerDecoderLayer',
    'conditional_detr/conditional-detr_r50_8xb2-50e_coco': 'ConditionalDetrTransformerDecoderLayer',
    'dab_detr/dab-detr_r50_8xb2-50e_coco': 'DABDetrTransformerDecoderLayer',
    'mask2former/mask2former_r50_8xb2-lsj-50e_coco': 'Mask2FormerTransformerDecoderLayer',
    'maskformer/maskformer_r50_ms-16xb1-75e_coco': 'DetrTransformerDecoderLayer',
}


def small(model: dict) -> None:
    """Make the config of a model cheap: a thin ResNet-18, two layers of each kind, few queries."""
    from mmzero.analysis.sweep.reduction import walk

    for part in walk(model):
        if part.get('type') == 'ResNet':
            part.update(depth=18, base_channels=4)
        if isinstance(part.get('in_channels'), list):
            part['in_channels'] = [CHANNELS[number] for number in part['in_channels']]
        sizes = dict(feedforward_channels=32, num_layers=2, num_queries=10)
        part.update({key: value for key, value in sizes.items() if isinstance(part.get(key), int)})


@pytest.mark.parametrize('name', CASES)
def test_same_step(name: str) -> None:
    from mmzero.analysis.sweep.models import Case

    case = Case(get_config(f'mmdet::{name}.py'), size=64)
    small(case.model_cfg)
    model = case.build()
    batch = case.batch(model, 0)
    kinds = ('EncoderLayer', 'DecoderLayer')
    layers = [path for path, module in model.named_modules() if type(module).__name__.endswith(kinds)]
    assert len(layers) == 4

    def run(model: nn.Module) -> Any:
        data = model.data_preprocessor(copy.deepcopy(batch), True)
        return model(**data, mode='loss')

    applied = check_same_step(model, run, CheckpointingConfig(modules=tuple(layers)))
    assert applied.counts[CASES[name]] == 2
