"""Whether a value of a config can be of the type that an annotation names."""

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch


def accepts(wanted: Any, value: Any) -> bool:
    """Say whether a value of a config can be of a type.

    Args:
        wanted: An annotation. What is not plain data is not judged.
        value (Any): The value.

    Returns:
        bool: False where it certainly cannot.
    """
    origin = typing.get_origin(wanted)
    if origin in (typing.Union, types.UnionType):
        return any(accepts(item, value) for item in typing.get_args(wanted))
    if origin is typing.Literal:
        return value in typing.get_args(wanted)
    if origin is not None:
        wanted = origin
    if wanted is None or wanted is type(None):
        return value is None
    if wanted in _PLAIN:
        return _PLAIN[wanted](value)
    if wanted is torch.Tensor:
        return isinstance(value, torch.Tensor)
    if inspect.isclass(wanted) and issubclass(wanted, Mapping):
        return isinstance(value, Mapping)
    if inspect.isclass(wanted) and issubclass(wanted, (list, tuple, Sequence)):
        return _is_sequence(value)
    return True


def _is_int(value: Any) -> bool:
    return _is_float(value) and float(value).is_integer()


def _is_float(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def _is_sequence(value: Any) -> bool:
    return not isinstance(value, (str, bytes, Mapping, bool, int, float)) and value is not None


_PLAIN: dict[Any, Callable[[Any], bool]] = {
    bool: lambda value: isinstance(value, (bool, np.bool_)),
    int: _is_int,
    float: _is_float,
    str: lambda value: isinstance(value, str),
}


def describe(wanted: Any) -> str:
    """Name a type as users write it.

    Args:
        wanted: An annotation.

    Returns:
        str: For instance ``'int or None'``.
    """
    origin = typing.get_origin(wanted)
    if origin in (typing.Union, types.UnionType):
        return ' or '.join(dict.fromkeys(describe(item) for item in typing.get_args(wanted)))
    if origin is typing.Literal:
        return ' or '.join(repr(item) for item in typing.get_args(wanted))
    if origin is tuple and _is_pair_of_numbers(typing.get_args(wanted)):
        return 'a pair of numbers'
    if origin is not None:
        wanted = origin
    if wanted is type(None):
        return 'None'
    if inspect.isclass(wanted) and issubclass(wanted, Mapping):
        return 'a dict'
    if inspect.isclass(wanted) and wanted is not str and issubclass(wanted, (list, tuple, Sequence)):
        return 'a list or tuple'
    return getattr(wanted, '__name__', str(wanted))


def _is_pair_of_numbers(items: tuple) -> bool:
    return len(items) == 2 and Ellipsis not in items and all(accepts(item, 0.5) or item is int for item in items)
