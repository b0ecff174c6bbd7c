"""A stand-in for torchvision, from which timm and mmpretrain import much that their models never call."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType

from torch import nn


class _Names(type(nn.Module)):
    """A class of which any attribute is its own name, such as an enumeration's members."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith('_'):
            raise AttributeError(name)
        return name


class _Module(ModuleType):
    # MMEngine's runner logs it.
    __version__ = 'a stand-in'

    def __getattr__(self, name: str) -> type:
        if name.startswith('__'):
            raise AttributeError(name)
        made = _Names(name, (nn.Module,), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition('.')[0] != 'torchvision':
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in() -> None:
    """Let ``import torchvision`` work where it is not installed."""
    if importlib.util.find_spec('torchvision') is None:
        sys.meta_path.append(_Finder())
