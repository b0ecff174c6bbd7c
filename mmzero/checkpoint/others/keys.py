"""Under which key of a file others keep the weights."""

import logging
from collections.abc import Mapping
from typing import Any

from mmengine.logging import print_log
from torch import Tensor

from mmzero.errors import CheckpointError

# OpenMMLab and timm; Swin, DeiT, MAE and DETR; training scripts; DeepSpeed; averages, where nothing else is there.
KEYS = (
    'state_dict',
    'model',
    'model_state_dict',
    'model_state',
    'net',
    'network',
    'module',
    'weights',
    'params',
    'state_dict_ema',
    'model_ema',
    'params_ema',
    'teacher',
    'student',
)


def weights_in(loaded: Mapping[str, Any], filename: str) -> tuple[Any, dict[str, Any]]:
    """Find the weights in what a file holds.

    Args:
        loaded (Mapping[str, Any]): What was read: weights by name, or these under one of :data:`KEYS`.
        filename (str): The file, for the log.

    Returns:
        tuple[Any, dict]: The weights, and what else the file holds; the latter only beside MMEngine's own key, since
        other programs' counters and optimizers mean something else.

    Raises:
        CheckpointError: If there are none.
    """
    if 'state_dict' in loaded:
        # MMEngine's own key: what is under it is meant, whatever it is.
        found = ['state_dict', *(key for key in KEYS[1:] if _are_weights(loaded.get(key)))]
    else:
        found = [key for key in KEYS if _are_weights(loaded.get(key))]
    if not found:
        if loaded and not any(isinstance(value, Tensor) for value in loaded.values()):
            raise CheckpointError(f'{filename} holds no weights; it holds {", ".join(map(repr, list(loaded)[:8]))}')
        return loaded, {}
    if len(found) > 1:
        others = ', '.join(map(repr, found[1:]))
        print_log(f'{filename}: weights are taken from {found[0]!r}; it also holds {others}', 'current', logging.INFO)
    rest = {key: value for key, value in loaded.items() if key != found[0]}
    return loaded[found[0]], rest if found[0] == 'state_dict' else {}


def _are_weights(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(item, Tensor) for item in value.values())
