"""Batches for models of mmpretrain, which ships no helper that makes some."""

import torch
from mmpretrain.structures import DataSample
from torch import nn


def demo_batch(model: nn.Module, size: int, number: int, *, classes: int, empty: bool = False) -> dict:
    """Make one of a series of batches of two images with a label each.

    Args:
        model (nn.Module): The classifier.
        size (int): Side of the square images in pixels.
        number (int): Which batch of the series.
        classes (int): Labels lie below it.
        empty (bool): Of no effect: an image without a class does not exist. Defaults to False.

    Returns:
        dict: ``inputs`` and ``data_samples`` as a data loader gives them.
    """
    generator = torch.Generator().manual_seed(number)
    images = torch.randint(0, 255, (2, 3, size, size), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, classes, (2,), generator=generator)
    samples = [DataSample().set_gt_label(label.item()) for label in labels]
    return dict(inputs=list(images), data_samples=samples)
