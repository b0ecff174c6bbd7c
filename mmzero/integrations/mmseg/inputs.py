"""Batches for models of mmseg, which ships no helper that makes some."""

import torch
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample
from torch import nn

IGNORED = 255
"""The label of pixels that no loss counts."""


def demo_batch(model: nn.Module, size: int, number: int, *, classes: int, empty: bool = False) -> dict:
    """Make one of a series of batches of two images.

    Args:
        model (nn.Module): The segmentor.
        size (int): Side of the square images in pixels.
        number (int): Which batch of the series.
        classes (int): Labels lie below it.
        empty (bool): Whether every pixel is to be ignored. Defaults to False.

    Returns:
        dict: ``inputs`` and ``data_samples`` as a data loader gives them.
    """
    generator = torch.Generator().manual_seed(number)
    images, samples = [], []
    for _ in range(2):
        images.append(torch.randint(0, 255, (3, size, size), generator=generator, dtype=torch.uint8))
        labels = torch.randint(0, classes, (1, size // 8, size // 8), generator=generator)
        labels = labels.repeat_interleave(8, 1).repeat_interleave(8, 2)
        sample = SegDataSample(metainfo=dict(img_shape=(size, size), ori_shape=(size, size), pad_shape=(size, size)))
        sample.gt_sem_seg = PixelData(data=torch.full_like(labels, IGNORED) if empty else labels)
        sample.gt_edge_map = PixelData(data=torch.zeros_like(labels))
        samples.append(sample)
    return dict(inputs=images, data_samples=samples)
