"""Checkpoints made of tensors and plain Python values, so that ``torch.load(weights_only=True)`` reads them."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from mmengine.logging import HistoryBuffer, print_log

_SCALARS: tuple[type, ...] = (bool, int, float, str, bytes)


def plain(value: Any, path: str = 'checkpoint') -> Any:
    """Turn a value into tensors, numbers, strings, lists, tuples and dicts.

    Args:
        value (Any): Part of a checkpoint.
        path (str): Where it stands, for the warning. Defaults to 'checkpoint'.

    Returns:
        Any: The plain value; an object that has none becomes None, with a warning that names it.
    """
    # numpy's float64 is a float too, but pickles as a numpy object; likewise members of an IntEnum.
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, torch.Tensor) or type(value) in _SCALARS:
        return value
    for scalar in _SCALARS:
        if isinstance(value, scalar):
            return scalar(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in 'biuf':
        return torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, HistoryBuffer):
        log, count = value.data
        return dict(log_history=plain(log), count_history=plain(count), max_length=value.max_length)
    if isinstance(value, Mapping):
        return {plain(key): plain(item, f'{path}.{key}') for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        items = [plain(item, f'{path}[{index}]') for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    print_log(f'{path}: a {type(value).__name__} cannot be saved as plain data and is left out', 'current', 30)
    return None


def message_hub_state(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the saved message hub into what ``MessageHub.load_state_dict`` takes.

    Args:
        saved (Mapping): From a checkpoint of mmzero or of MMEngine.

    Returns:
        dict: With log scalars as HistoryBuffer.
    """
    scalars = {name: _history(value) for name, value in saved['log_scalars'].items()}
    return dict(saved, log_scalars=scalars)


def _history(value: Any) -> Any:
    if not (isinstance(value, Mapping) and 'log_history' in value):
        return value
    log, count = value['log_history'].tolist(), value['count_history'].tolist()
    return HistoryBuffer(log, count, value['max_length'])
