"""Finding the classes that a config names."""

import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from mmengine.registry import DefaultScope, Registry
from torch import nn

from mmzero.errors import near_names

# Packages whose registries are asked for a class that the default scope does not have.
PROJECTS = ('mmdet', 'mmpretrain', 'mmseg', 'mmpose')

# Dicts of which the reader of a layer takes out some fields before a constructor gets the rest. Building the model
# finds what is wrong in them.
LAYER_DICTS = ('norm_cfg', 'act_cfg', 'conv_cfg', 'dcn', 'init_cfg', 'upsample_cfg', 'padding_cfg', 'plugins')


def lookup(registry: Registry, name: str, scope: str) -> tuple[Callable | None, list[str]]:
    """Look up a class as building it will.

    Args:
        registry (Registry): MMEngine's root registry of the kind.
        name (str): The name, with or without a scope.
        scope (str): The default scope.

    Returns:
        tuple[Callable or None, list[str]]: The class, and the names that are known there.
    """
    with DefaultScope.overwrite_default_scope(scope), registry.switch_scope_and_registry(None) as local:
        try:
            found = local.get(name)
        except (ImportError, AttributeError, ValueError, RuntimeError):  # a dotted name that is not there
            found = None
        known: list[str] = []
        level: Registry | None = local
        while level is not None:
            known += level.module_dict
            level = level.parent
    return found, known


def advice(registry: Registry, name: str, scope: str) -> str:
    """Say what may be meant by a name that is not found.

    Args:
        registry (Registry): MMEngine's root registry of the kind.
        name (str): The name.
        scope (str): The default scope.

    Returns:
        str: The scope of a package that has it, or near names.
    """
    for other in PROJECTS:
        if other != scope and importlib.util.find_spec(other) is not None and lookup(registry, name, other)[0]:
            return f"; {other} has it: set default_scope='{other}'"
    return near_names(name, lookup(registry, name, scope)[1])


@cache
def mentioned(target: Callable) -> frozenset[str]:
    """Collect the strings in the code of a class and its parents: among them are the keys that it reads from dicts.

    Args:
        target (Callable): The class.

    Returns:
        frozenset[str]: The strings that could be keys.
    """
    found: set[str] = set()
    for base in getattr(target, '__mro__', ()):
        for member in vars(base).values() if base is not nn.Module else ():
            code = getattr(inspect.unwrap(member) if inspect.isfunction(member) else member, '__code__', None)
            found.update(item for item in getattr(code, 'co_consts', ()) if isinstance(item, str))
    return frozenset(item for item in found if item.isidentifier())


def typed(cfg: Any, path: str, around: tuple[Mapping, ...] = ()) -> Iterator[tuple[str, Mapping, tuple]]:
    """Dicts with a ``type`` in a tree of dicts and lists: path, dict, and those around it."""
    if isinstance(cfg, Mapping):
        if 'type' in cfg:
            yield path, cfg, around
            around = (*around, cfg)
        for key, value in cfg.items():
            if key not in LAYER_DICTS:
                yield from typed(value, f'{path}.{key}', around)
    elif isinstance(cfg, (list, tuple)):
        for index, item in enumerate(cfg):
            yield from typed(item, f'{path}[{index}]', around)
