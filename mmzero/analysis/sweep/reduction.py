"""The one rule by which a config becomes a case that fits a small machine."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

SIZES = (128, 256, 320)
"""Sides of the square images in pixels: the first, or the next where the plain model does not train on it."""

SYNCED_NORMS = ('SyncBN', 'MMSyncBN', 'SyncBatchNorm', 'NaiveSyncBN')


def reduced(cfg: Mapping, size: int) -> dict:
    """Copy a config's model, made fit for a CPU: depth, width, losses and every other setting stay.

    Three things change: the sizes to which a data preprocessor pads or scales become the image size; synchronised batch
    norms, which torch has for GPUs alone, become plain ones; and no pretrained weights are loaded.

    Args:
        cfg (Mapping): The whole config.
        size (int): Side of the square images in pixels.

    Returns:
        dict: The model's config, with its data preprocessor.
    """
    model = without_pretrained(dict(cfg['model']))
    if cfg.get('data_preprocessor') is not None:
        model.setdefault('data_preprocessor', copy.deepcopy(cfg['data_preprocessor']))
    for part in walk(model):
        if part.get('type') in SYNCED_NORMS:
            part['type'] = 'BN'
    for preprocessor in walk(model):
        if isinstance(preprocessor.get('data_preprocessor'), dict):
            _shrink(preprocessor['data_preprocessor'], size)
    return model


def without_pretrained(model: dict) -> dict:
    """Copy a model's config without the files that its parts begin with.

    Args:
        model (dict): The model's config.

    Returns:
        dict: The copy.
    """
    model = copy.deepcopy(model)
    for part in walk(model):
        _drop_pretrained(part)
    return model


def walk(value: Any) -> Iterator[dict]:
    """Yield all dicts within a config, outer ones first.

    Args:
        value (Any): The config, or a part of it.

    Yields:
        dict: A dict; it may be changed.
    """
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from walk(item)


def _drop_pretrained(part: dict) -> None:
    if part.get('pretrained') is not None and not isinstance(part['pretrained'], dict):
        # timm's backbones want to be told.
        part['pretrained'] = False if isinstance(part['pretrained'], bool) else None
    init = part.get('init_cfg')
    entries = init if isinstance(init, (list, tuple)) else [init]
    left = [entry for entry in entries if not _reads_file(entry)]
    if len(left) < len(entries):
        part['init_cfg'] = left or None


def _reads_file(entry: Any) -> bool:
    """Whether an ``init_cfg`` names a file; PVT's has no type beside it."""
    return isinstance(entry, dict) and (entry.get('type') == 'Pretrained' or 'checkpoint' in entry)


def _shrink(preprocessor: dict, size: int) -> None:
    for part in walk(preprocessor):
        for key in ('size', 'random_size_range'):
            if part.get(key) is not None:
                part[key] = (size, size)
