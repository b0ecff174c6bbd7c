"""Batches for any model of mmdet, made by mmdet's own testing helpers."""

import random
from typing import Any

import numpy as np
import torch
from mmdet.models import BaseMOTModel
from mmdet.models.detectors.semi_base import SemiBaseDetector
from mmdet.models.reid.base_reid import BaseReID
from mmdet.structures import ReIDDataSample
from mmdet.testing import demo_mm_inputs, demo_mm_proposals, demo_track_inputs
from torch import nn

IMAGES = 2
"""In a batch; batch norm over the 1 x 1 maps of small images needs more than one."""

PROPOSALS = 20
"""For an image."""


def demo_batch(model: nn.Module, size: int, number: int, *, classes: int, empty: bool = False) -> dict:
    """Make one of a series of batches.

    Args:
        model (nn.Module): Any detector, tracker or model of re-identification; what it is decides on the layout.
        size (int): Side of the square images in pixels.
        number (int): Which batch of the series; equal numbers are equal batches.
        classes (int): Labels lie below it.
        empty (bool): Whether no image has an object. Defaults to False.

    Returns:
        dict: ``inputs`` and ``data_samples`` as a data loader gives them.
    """
    random.seed(number)
    np.random.seed(number)
    if isinstance(model, BaseReID):
        return _identities(size, number)
    if isinstance(model, SemiBaseDetector):
        branches = ('sup', 'unsup_teacher', 'unsup_student')
        parts = [_images(size, number, classes, empty) for _ in branches]
        return {key: dict(zip(branches, [part[key] for part in parts], strict=True)) for key in parts[0]}
    if isinstance(model, BaseMOTModel) and not getattr(model.data_preprocessor, 'use_det_processor', False):
        return _clips(size, number, classes, empty)
    return _images(size, number, classes, empty)


def _images(size: int, number: int, classes: int, empty: bool) -> dict:
    batch = _last_of_series(demo_mm_inputs, size, number, empty, with_semantic=True)
    proposals = demo_mm_proposals([(3, size, size)] * IMAGES, PROPOSALS)
    for sample, proposed in zip(batch['data_samples'], proposals, strict=True):
        # For models without a first stage of their own.
        sample.proposals = proposed
        # What models of mmdet ask an image's data for beyond what the helper sets.
        sample.set_metainfo(dict(pad_shape=(size, size), batch_input_shape=(size, size)))
        sample.gt_instances.labels %= classes
        sample.gt_sem_seg.sem_seg = sample.gt_sem_seg.sem_seg.long() % classes
        sample.homography_matrix = np.eye(3, dtype=np.float32)
    return batch


def _clips(size: int, number: int, classes: int, empty: bool) -> dict:
    batch = _last_of_series(demo_track_inputs, size, number, empty, num_frames=2, key_frames_inds=[0])
    for clip in batch['data_samples']:
        for frame in clip.video_data_samples:
            instances = frame.gt_instances
            instances.labels %= classes
            # Objects are found again in the other frame.
            instances.instances_ids = torch.arange(len(instances.labels))
    return batch


def _last_of_series(helper: Any, size: int, number: int, empty: bool, **options: Any) -> dict:
    """The helpers draw from one fixed seed: a batch of the series is what comes at the end of a longer one."""
    count = IMAGES * (number + 1)
    items = [0] * count if empty else None
    shapes = [(3, size, size)] * count
    batch = helper(batch_size=count, image_shapes=shapes, num_items=items, with_mask=True, **options)
    return {key: value[-IMAGES:] for key, value in batch.items()}


def _identities(size: int, number: int) -> dict:
    """One item with two upright images of each of two persons, as mmdet's data set samples them for a triplet loss."""
    generator = torch.Generator().manual_seed(number)
    images = torch.randint(0, 255, (4, 3, size, size // 2), generator=generator, dtype=torch.uint8)
    return dict(inputs=[images], data_samples=[ReIDDataSample().set_gt_label([0, 0, 1, 1])])
