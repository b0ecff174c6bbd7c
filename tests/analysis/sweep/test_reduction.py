"""What of a config the sweep changes, and which configs it takes."""

import copy

import pytest
from mmengine.config import Config

from mmzero.analysis.sweep import families
from mmzero.analysis.sweep.families import read, shipped_configs
from mmzero.analysis.sweep.reduction import reduced
from mmzero.errors import ConfigError


def test_sizes_norms_and_weights_change_and_nothing_else() -> None:
    pad = dict(type='BatchFixedSizePad', size=(1024, 1024), img_pad_value=0)
    model = dict(
        type='RTMDet',
        pretrained='open-mmlab://resnet50',
        backbone=dict(
            type='CSPNeXt',
            deepen_factor=1,
            norm_cfg=dict(type='SyncBN', eps=1e-3),
            init_cfg=dict(type='Pretrained', checkpoint='https://none.invalid/a.pth'),
        ),
        neck=dict(
            pretrained=True,
            init_cfg=[dict(type='Kaiming', layer='Conv2d'), dict(type='Pretrained', checkpoint='b.pth')],
        ),
        bbox_head=dict(size=(7, 7), norm_cfg=dict(type='GN', num_groups=32), init_cfg=dict(checkpoint='c.pth')),
    )
    cfg = Config(dict(model=model, data_preprocessor=dict(type='DetDataPreprocessor', batch_augments=[pad])))
    before = copy.deepcopy(cfg.to_dict())
    expected = copy.deepcopy(model)
    expected['pretrained'] = None
    expected['backbone'].update(norm_cfg=dict(type='BN', eps=1e-3), init_cfg=None)
    expected['bbox_head']['init_cfg'] = None
    expected['neck'].update(pretrained=False, init_cfg=[dict(type='Kaiming', layer='Conv2d')])
    expected['data_preprocessor'] = dict(
        type='DetDataPreprocessor', batch_augments=[dict(type='BatchFixedSizePad', size=(96, 96), img_pad_value=0)]
    )
    assert reduced(cfg, 96) == expected
    assert cfg.to_dict() == before


def test_families() -> None:
    found = families(tries=3)
    names = [configs[0] for configs in found]
    folders = [name.split('::')[1].split('/')[0] for name in names]
    assert len(names) >= 100 and len(set(folders)) == len(names)
    assert 'mmdet::atss/atss_r101_fpn_1x_coco.py' in names
    # The first of the family has no model.
    assert read(next(name for name in names if '::openimages/' in name)).model.type
    for configs in found:
        assert 1 <= len(configs) == len(set(configs)) <= 3
        assert all(name.split('/')[0] == configs[0].split('/')[0] for name in configs)
    assert sum(len(configs) == 3 for configs in found) > 50
    assert all(path.suffix == '.py' and '_base_' not in path.parts for path in shipped_configs()['dino'])


def test_errors() -> None:
    with pytest.raises(ConfigError, match='nosuchpackage: is not installed'):
        families('nosuchpackage')
    with pytest.raises(ConfigError, match='has no model; it is part of other configs'):
        read('mmdet::common/lsj-100e_coco-detection.py')
