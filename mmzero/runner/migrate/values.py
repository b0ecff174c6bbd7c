"""Values of configs as a file can hold them: names of classes, functions and dtypes in place of themselves."""

import enum
import functools
from collections.abc import Mapping
from typing import Any

import torch


def plain(value: Any) -> Any:
    """Make of a value what a config file can hold.

    Args:
        value (Any): Anything that a config has.

    Returns:
        Any: The same in dicts, lists, tuples, strings and numbers. What no file can hold stays as it is.
    """
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, enum.Enum):
        return value.name
    return importable_name(value) or value


def importable_name(value: Any) -> str | None:
    """Name a class or function by its path.

    Args:
        value (Any): Anything.

    Returns:
        str or None: Such as 'torch.optim.adamw.AdamW'; None for what no path leads to.
    """
    module, name = getattr(value, '__module__', None), getattr(value, '__qualname__', None)
    is_found = isinstance(value, type) or callable(value)
    if not is_found or not isinstance(module, str) or not isinstance(name, str) or '<' in name:
        return None
    # What a config file defines itself has the name of a file that is gone by now.
    return None if module == 'builtins' or 'tmp' in module.split('.')[0] else f'{module}.{name}'


def dtype_name(value: Any) -> Any:
    """Name a dtype.

    Args:
        value (torch.dtype or str): As FSDP's MixedPrecision takes it.

    Returns:
        Any: Such as 'bfloat16'; what is no dtype stays as it is.
    """
    text = str(value).removeprefix('torch.')
    return {'half': 'float16', 'float': 'float32'}.get(text, text) if isinstance(value, (str, torch.dtype)) else value


def policy_value(value: Any) -> Any:
    """Make of a wrap policy what ``wrap_policy`` of a config file can hold.

    Args:
        value (str or dict or Callable): A policy as MMFullyShardedDataParallel takes it.

    Returns:
        str or dict: The policy by name, with its arguments.

    Raises:
        ValueError: If a file cannot hold it; says why.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, functools.partial):
        if value.args:
            raise ValueError('arguments without names cannot stand in a config')
        return _with_arguments(policy_value(value.func), value.keywords)
    if isinstance(value, Mapping) and 'type' in value:
        return _with_arguments(policy_value(value['type']), {key: item for key, item in value.items() if key != 'type'})
    name = importable_name(value)
    if name is None:
        raise ValueError('no path leads to this function; put it into a module, and name it there')
    return name


def _with_arguments(policy: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    named = policy if isinstance(policy, dict) else dict(type=policy)
    held = {key: plain(_listed(item)) for key, item in arguments.items()}
    for key, item in held.items():
        if not _is_literal(item):
            raise ValueError(f'its argument {key}={item!r} cannot stand in a config')
    return {**named, **held}


def _listed(value: Any) -> Any:
    """Sets of classes, which torch's policies take, as lists, which a file has in one order."""
    return sorted(value, key=str) if isinstance(value, (set, frozenset)) else value


def _is_literal(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_literal(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_literal(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
