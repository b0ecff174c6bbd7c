"""Importing the models of packages that only ``make test-zoo`` installs."""

import importlib
import importlib.util
import sys
from types import ModuleType

import pytest

import mmzero  # noqa: F401
from tests.patches.zoo.stand_in import stand_in

# It asks transformers for what version 5 no longer has, and fails to import.
BROKEN = 'mmpretrain.models.multimodal'


def models_of(package: str) -> ModuleType:
    """Import a package's models, or skip the tests of a file."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f'{package} is not installed; make test-zoo installs it', allow_module_level=True)
    stand_in()
    if package == 'mmpretrain':
        sys.modules.setdefault(BROKEN, ModuleType(BROKEN))
    return importlib.import_module(f'{package}.models')
