"""Small detectors of mmdet with a teacher inside, and their batches."""

import copy
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.detectors import MASK_RCNN, PREPROCESSOR, build_detector
from tests.models import detection_batch

_NORM = dict(type='BN')
_BACKBONE = dict(type='ResNet', depth=18, base_channels=8, stem_channels=8, norm_cfg=_NORM)

# Its predictions need no compiled nms.
CENTERNET = dict(
    type='CenterNet',
    data_preprocessor=PREPROCESSOR,
    backbone=_BACKBONE,
    neck=dict(
        type='CTResNetNeck',
        in_channels=64,
        num_deconv_filters=(32, 16, 16),
        num_deconv_kernels=(4, 4, 4),
        use_dcn=False,
    ),
    bbox_head=dict(
        type='CenterNetHead',
        num_classes=5,
        in_channels=16,
        feat_channels=16,
        loss_center_heatmap=dict(type='GaussianFocalLoss', loss_weight=1.0),
        loss_wh=dict(type='L1Loss', loss_weight=0.1),
        loss_offset=dict(type='L1Loss', loss_weight=1.0),
    ),
    test_cfg=dict(topk=10, local_maximum_kernel=3, max_per_img=10),
)
SEMI = dict(
    type='SemiBaseDetector',
    detector=CENTERNET,
    data_preprocessor=dict(type='MultiBranchDataPreprocessor', data_preprocessor=PREPROCESSOR),
    semi_train_cfg=dict(
        freeze_teacher=True, sup_weight=1.0, unsup_weight=2.0, cls_pseudo_thr=0.0, min_pseudo_bbox_wh=(1e-2, 1e-2)
    ),
    semi_test_cfg=dict(predict_on='teacher'),
)


def _faster_rcnn() -> dict:
    cfg = copy.deepcopy(MASK_RCNN)
    cfg.update(type='FasterRCNN', data_preprocessor=PREPROCESSOR)
    for name in ('mask_roi_extractor', 'mask_head'):
        del cfg['roi_head'][name]
    return cfg


# Has RoIAlign and nms, which only full mmcv has.
SOFT_TEACHER = dict(
    SEMI,
    type='SoftTeacher',
    detector=_faster_rcnn(),
    semi_train_cfg=dict(
        freeze_teacher=True,
        sup_weight=1.0,
        unsup_weight=4.0,
        pseudo_label_initial_score_thr=0.1,
        rpn_pseudo_thr=0.15,
        cls_pseudo_thr=0.15,
        reg_pseudo_thr=0.5,
        jitter_times=3,
        jitter_scale=0.06,
        min_pseudo_bbox_wh=(1e-2, 1e-2),
    ),
)

_FPN = dict(
    type='FPN', in_channels=[8, 16, 32, 64], out_channels=16, start_level=1, add_extra_convs='on_output', num_outs=5
)
_ANCHORS = dict(
    type='AnchorGenerator', ratios=[1.0], octave_base_scale=8, scales_per_octave=1, strides=[8, 16, 32, 64, 128]
)
_TEST = dict(nms_pre=50, min_bbox_size=0, score_thr=0.0, nms=dict(type='nms', iou_threshold=0.6), max_per_img=10)
_ATSS = dict(assigner=dict(type='ATSSAssigner', topk=9), allowed_border=-1, pos_weight=-1, debug=False)
_HEAD = dict(
    num_classes=5,
    in_channels=16,
    stacked_convs=1,
    feat_channels=16,
    norm_cfg=dict(type='GN', num_groups=4),
    anchor_generator=_ANCHORS,
)
_GFL = dict(
    _HEAD,
    loss_cls=dict(type='QualityFocalLoss', use_sigmoid=True, beta=2.0, loss_weight=1.0),
    loss_dfl=dict(type='DistributionFocalLoss', loss_weight=0.25),
    reg_max=4,
    loss_bbox=dict(type='GIoULoss', loss_weight=2.0),
)
TEACHER = dict(
    type='GFL',
    data_preprocessor=PREPROCESSOR,
    backbone=_BACKBONE,
    neck=_FPN,
    bbox_head=dict(_GFL, type='GFLHead'),
    train_cfg=_ATSS,
    test_cfg=_TEST,
)
DISTILLED = dict(
    type='KnowledgeDistillationSingleStageDetector',
    data_preprocessor=PREPROCESSOR,
    teacher_config=dict(model=TEACHER),
    teacher_ckpt=None,
    backbone=_BACKBONE,
    neck=_FPN,
    bbox_head=dict(_GFL, type='LDHead', loss_ld=dict(type='KnowledgeDistillationKLDivLoss', loss_weight=0.25, T=10)),
    train_cfg=_ATSS,
    test_cfg=_TEST,
)
_PAA = dict(
    _HEAD,
    type='LADHead',
    reg_decoded_bbox=True,
    score_voting=True,
    topk=9,
    bbox_coder=dict(type='DeltaXYWHBBoxCoder', target_means=[0.0] * 4, target_stds=[0.1, 0.1, 0.2, 0.2]),
    loss_cls=dict(type='FocalLoss', use_sigmoid=True, gamma=2.0, alpha=0.25, loss_weight=1.0),
    loss_bbox=dict(type='GIoULoss', loss_weight=1.3),
    loss_centerness=dict(type='CrossEntropyLoss', use_sigmoid=True, loss_weight=0.5),
)
LAD = dict(
    type='LAD',
    data_preprocessor=PREPROCESSOR,
    backbone=_BACKBONE,
    neck=_FPN,
    bbox_head=_PAA,
    teacher_backbone=_BACKBONE,
    teacher_neck=_FPN,
    teacher_bbox_head=_PAA,
    train_cfg=dict(
        assigner=dict(type='MaxIoUAssigner', pos_iou_thr=0.1, neg_iou_thr=0.1, min_pos_iou=0, ignore_iof_thr=-1),
        allowed_border=-1,
        pos_weight=-1,
        debug=False,
    ),
    test_cfg=dict(_TEST, score_voting=True),
)


def build(cfg: dict, seed: int = 0) -> nn.Module:
    """Build a detector with its initial weights."""
    torch.manual_seed(seed)
    return build_detector(copy.deepcopy(cfg))


def semi(threshold: float = 0.0) -> Any:
    """A student and its teacher, which finds boxes of some size; they count from a score on."""
    model: Any = build(dict(SEMI, semi_train_cfg=dict(SEMI['semi_train_cfg'], cls_pseudo_thr=threshold)))
    for part in (model.student, model.teacher):
        nn.init.constant_(part.bbox_head.wh_head[-1].bias, 3.0)
    return model


def images(seed: int, number: int, **more: Any) -> dict:
    """Images with boxes, and what CenterNet wants to know of them."""
    batch = detection_batch(seed, number, 64)
    for sample in batch['data_samples']:
        sample.set_metainfo(dict(border=(0, 64, 0, 64), **more))
    return batch


def semi_batch(seed: int) -> dict:
    """One image with labels, and two without, each seen in two ways."""
    branches = dict(sup=images(seed, 1))
    for name, shift in (('unsup_teacher', 0), ('unsup_student', 3)):
        matrix = np.array([[1, 0, shift], [0, 1, 0], [0, 0, 1]], dtype=np.float32)
        branches[name] = images(seed + 500, 2, homography_matrix=matrix, flip=False)
    return {key: {name: list(branch[key]) for name, branch in branches.items()} for key in ('inputs', 'data_samples')}
