"""Reading dicts into frozen dataclasses, collecting faults instead of stopping at the first."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch

from mmzero.errors import ConfigError, near_names

Reader = Callable[[Any], Any]
"""Turns a config value into the field's value; raises ValueError saying what is allowed."""

T = TypeVar('T')


@dataclass(frozen=True)
class ListOf:
    """Reads a list of mappings, each into a dataclass.

    Args:
        item (type): The dataclass.
    """

    item: type


def option(default: Any, read: Reader | type | ListOf) -> Any:
    """Declare a field of a dataclass that is read from a config.

    Args:
        default (Any): Its default.
        read (Callable or type or ListOf): Reads its value; a dataclass reads a mapping, by a ``read_config(value,
            path, faults)`` of its own if it has one.

    Returns:
        Any: As ``dataclasses.field``.
    """
    return field(default=default, metadata={'read': read})


class Faults:
    """The faults found so far, each with its config path."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, path: str, message: str) -> None:
        """Note a fault.

        Args:
            path (str): Where, e.g. ``model_wrapper_cfg.mesh.shard``.
            message (str): What was found, what is allowed, what to do.
        """
        self.lines.append(f'{path}: {message}')

    def at(self, path: str) -> bool:
        """Say whether a fault was noted at a path or below it.

        Args:
            path (str): The config path.

        Returns:
            bool: Whether there is one.
        """
        return any(line.startswith((f'{path}:', f'{path}.', f'{path}[')) for line in self.lines)

    def move(self, path: str, to: str) -> None:
        """Tell what was noted at a path, or below it, as of another one.

        Args:
            path (str): The config path.
            to (str): Where the user wrote it.
        """
        self.lines = [
            to + line[len(path) :] if line.startswith((f'{path}:', f'{path}.')) else line for line in self.lines
        ]

    def raise_if_any(self) -> None:
        """Raise all faults in one error.

        Raises:
            ConfigError: If a fault was noted.
        """
        if self.lines:
            # Some are found in several ways.
            raise ConfigError(list(dict.fromkeys(self.lines)))


def read_fields(cls: type[T], cfg: Any, path: str, faults: Faults) -> T:
    """Read a mapping into a dataclass whose fields carry a ``read`` function in their metadata.

    The mapping is not changed. A field with a fault keeps its default, so that reading goes on.

    Args:
        cls (type): The dataclass.
        cfg (Mapping): Field names to values.
        path (str): The config path of ``cfg``.
        faults (Faults): Takes what is wrong.

    Returns:
        The dataclass instance.
    """
    known = {item.name: item for item in fields(cls) if 'read' in item.metadata}  # type: ignore[arg-type]
    if not isinstance(cfg, Mapping):
        # Of many fields nobody would look for one there.
        names = f', with {" and ".join(known)}' if len(known) <= 4 else ''
        faults.add(path, f'got {cfg!r}; expected a dict{names}')
        return cls()
    values: dict[str, Any] = {}
    for name, value in cfg.items():
        if name not in known:
            faults.add(f'{path}.{name}', f'unknown field{near_names(str(name), known)}')
            continue
        read = known[name].metadata['read']
        if isinstance(read, type):
            read_config = getattr(read, 'read_config', functools.partial(read_fields, read))
            values[name] = read_config(value, f'{path}.{name}', faults)
            continue
        if isinstance(read, ListOf):
            values[name] = _read_list(read.item, value, f'{path}.{name}', faults)
            continue
        try:
            values[name] = read(value)
        except (TypeError, ValueError) as error:
            faults.add(f'{path}.{name}', f'got {value!r}; {error}')
    return cls(**values)


def _read_list(cls: type[T], value: Any, path: str, faults: Faults) -> tuple[T, ...]:
    if not isinstance(value, (list, tuple)):
        faults.add(path, f'got {value!r}; expected a list of dicts')
        return ()
    return tuple(read_fields(cls, item, f'{path}[{index}]', faults) for index, item in enumerate(value))


def one_of(*allowed: Any) -> Reader:
    """A reader for a value out of a few."""

    def read(value: Any) -> Any:
        for item in allowed:
            # 1 == True and 1 == 1.0: only the exact type is the value that the user meant.
            if type(value) is type(item) and value == item:
                return item
        raise ValueError('allowed: ' + ', '.join(repr(item) for item in allowed))

    return read


def flag(value: Any) -> bool:
    """A reader for True or False."""
    return one_of(True, False)(value)


def optional_flag(value: Any) -> bool | None:
    """A reader for True, False or None."""
    return one_of(None, True, False)(value)


def size(value: Any) -> int:
    """A reader for a mesh size: a positive integer, or -1 for the rest of the world."""
    if type(value) is int and (value > 0 or value == -1):
        return value
    raise ValueError('allowed: a positive integer, or -1 for the rest of the world')


def is_number(value: Any) -> bool:
    """Say whether a value is a number, which True and False are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}


def optional_dtype(value: Any) -> torch.dtype | None:
    """A reader for a floating dtype given by name or as a torch.dtype."""
    if value is None:
        return None
    for name, dtype in DTYPES.items():
        if value == dtype or value in (name, f'torch.{name}'):
            return dtype
    raise ValueError(f'expected None or the name of a dtype{near_names(str(value), DTYPES)}')


def module_names(value: Any) -> tuple[str, ...]:
    """A reader for one module name or a list of them."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError("expected a list of module names, such as ['backbone', 'encoder.layers.0']")


def module_patterns(value: Any) -> tuple[str, ...]:
    """A reader for one pattern on the names of modules or a list of them."""
    patterns = (value,) if isinstance(value, str) else value
    if isinstance(patterns, (list, tuple)) and all(isinstance(item, str) and item for item in patterns):
        return tuple(patterns)
    raise ValueError("expected a list of patterns on the names of modules, such as ['**.norm*']")
