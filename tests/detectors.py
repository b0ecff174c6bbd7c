"""Detectors besides DINO that the tests train: RTMDet, and Mask R-CNN, whose RoIAlign only full mmcv has."""

import copy
import importlib.util
from typing import Any

import torch
from torch import nn

from mmzero.integrations.mmcv import install_stand_in
from tests.models import detection_batch

PREPROCESSOR = dict(type='DetDataPreprocessor', mean=[120.0] * 3, std=[60.0] * 3, pad_size_divisor=32)

RTMDET = dict(
    type='RTMDet',
    # It would make them synchronised ones on several ranks, which torch has for GPUs alone.
    use_syncbn=False,
    data_preprocessor=PREPROCESSOR,
    backbone=dict(
        type='CSPNeXt', deepen_factor=0.1, widen_factor=0.0625, norm_cfg=dict(type='BN'), act_cfg=dict(type='SiLU')
    ),
    neck=dict(
        type='CSPNeXtPAFPN',
        in_channels=[16, 32, 64],
        out_channels=16,
        num_csp_blocks=1,
        norm_cfg=dict(type='BN'),
        act_cfg=dict(type='SiLU'),
    ),
    bbox_head=dict(
        type='RTMDetSepBNHead',
        num_classes=5,
        in_channels=16,
        feat_channels=16,
        anchor_generator=dict(type='MlvlPointGenerator', offset=0, strides=[8, 16, 32]),
        bbox_coder=dict(type='DistancePointBBoxCoder'),
        loss_cls=dict(type='QualityFocalLoss', use_sigmoid=True, beta=2.0, loss_weight=1.0),
        loss_bbox=dict(type='GIoULoss', loss_weight=2.0),
        # Boxes of a size to begin with, so that some match; RTMDet-m and larger have it so.
        exp_on_reg=True,
        norm_cfg=dict(type='BN'),
        act_cfg=dict(type='SiLU'),
    ),
    train_cfg=dict(assigner=dict(type='DynamicSoftLabelAssigner', topk=4), allowed_border=-1, pos_weight=-1),
    test_cfg=dict(nms_pre=50, score_thr=0.0, nms=dict(type='nms', iou_threshold=0.65), max_per_img=10),
)
RTMDET_BLOCKS = ('CSPLayer',)

_BOX = dict(type='DeltaXYWHBBoxCoder', target_means=[0.0] * 4)
_SAMPLER = dict(type='RandomSampler', num=16, neg_pos_ub=-1)
_ASSIGNER = dict(type='MaxIoUAssigner', pos_iou_thr=0.5, neg_iou_thr=0.5, match_low_quality=True, ignore_iof_thr=-1)


def _extractor(size: int) -> dict:
    layer = dict(type='RoIAlign', output_size=size, sampling_ratio=0)
    return dict(type='SingleRoIExtractor', roi_layer=layer, out_channels=16, featmap_strides=[4, 8, 16, 32])


MASK_RCNN = dict(
    type='MaskRCNN',
    data_preprocessor=dict(PREPROCESSOR, pad_mask=True),
    backbone=dict(type='ResNet', depth=18, base_channels=8, stem_channels=8, norm_cfg=dict(type='BN')),
    neck=dict(type='FPN', in_channels=[8, 16, 32, 64], out_channels=16, num_outs=5),
    rpn_head=dict(
        type='RPNHead',
        in_channels=16,
        feat_channels=16,
        anchor_generator=dict(type='AnchorGenerator', scales=[4], ratios=[0.5, 1.0, 2.0], strides=[4, 8, 16, 32, 64]),
        bbox_coder=dict(_BOX, target_stds=[1.0] * 4),
        loss_cls=dict(type='CrossEntropyLoss', use_sigmoid=True),
        loss_bbox=dict(type='L1Loss'),
    ),
    roi_head=dict(
        type='StandardRoIHead',
        bbox_roi_extractor=_extractor(7),
        bbox_head=dict(
            type='Shared2FCBBoxHead',
            in_channels=16,
            fc_out_channels=16,
            roi_feat_size=7,
            num_classes=5,
            bbox_coder=dict(_BOX, target_stds=[0.1, 0.1, 0.2, 0.2]),
            loss_cls=dict(type='CrossEntropyLoss'),
            loss_bbox=dict(type='L1Loss'),
        ),
        mask_roi_extractor=_extractor(14),
        mask_head=dict(
            type='FCNMaskHead',
            num_convs=1,
            in_channels=16,
            conv_out_channels=16,
            num_classes=5,
            loss_mask=dict(type='CrossEntropyLoss', use_mask=True),
        ),
    ),
    train_cfg=dict(
        rpn=dict(
            assigner=dict(_ASSIGNER, pos_iou_thr=0.7, neg_iou_thr=0.3, min_pos_iou=0.3),
            sampler=dict(_SAMPLER, pos_fraction=0.5, add_gt_as_proposals=False),
            allowed_border=-1,
            pos_weight=-1,
        ),
        rpn_proposal=dict(nms_pre=50, max_per_img=20, nms=dict(type='nms', iou_threshold=0.7), min_bbox_size=0),
        rcnn=dict(
            assigner=dict(_ASSIGNER, min_pos_iou=0.5),
            sampler=dict(_SAMPLER, pos_fraction=0.25, add_gt_as_proposals=True),
            mask_size=28,
            pos_weight=-1,
        ),
    ),
    test_cfg=dict(
        rpn=dict(nms_pre=50, max_per_img=20, nms=dict(type='nms', iou_threshold=0.7), min_bbox_size=0),
        rcnn=dict(score_thr=0.0, nms=dict(type='nms', iou_threshold=0.5), max_per_img=10, mask_thr_binary=0.5),
    ),
)
MASK_RCNN_BLOCKS = ('BasicBlock',)


def has_full_mmcv() -> bool:
    """Whether mmcv has its compiled operators."""
    return importlib.util.find_spec('mmcv') is not None and not install_stand_in()


def build_detector(cfg: dict) -> nn.Module:
    """Build a model of mmdet, with its initial weights, from the seed that is set."""
    import mmdet.models  # noqa: F401
    from mmengine.config import ConfigDict
    from mmengine.registry import MODELS, DefaultScope

    with DefaultScope.overwrite_default_scope('mmdet'):
        # Two-stage detectors want their settings as attributes.
        model = MODELS.build(ConfigDict(copy.deepcopy(cfg)))
    model.init_weights()
    return model


def rtmdet() -> nn.Module:
    """A small RTMDet, with batch norm in all its blocks."""
    return build_detector(RTMDET)


def mask_rcnn() -> nn.Module:
    """A small Mask R-CNN."""
    return build_detector(MASK_RCNN)


def wide_batch(seed: int) -> dict:
    """Two images of 64 x 64 pixels."""
    return detection_batch(seed, size=64)


def mask_batch(seed: int) -> dict:
    """The same with masks, each a whole box."""
    from mmdet.structures.mask import BitmapMasks

    batch = wide_batch(seed)
    for sample in batch['data_samples']:
        boxes: Any = sample.gt_instances.bboxes
        masks = torch.zeros(len(boxes), 64, 64, dtype=torch.uint8)
        for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
            mask[top : bottom + 1, left : right + 1] = 1
        sample.gt_instances.masks = BitmapMasks(masks.numpy(), 64, 64)
    return batch
