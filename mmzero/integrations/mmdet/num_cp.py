"""mmdet's ``num_cp`` without fairscale.

The encoders of mmdet give their first ``num_cp`` layers to fairscale's ``checkpoint_wrapper``: re-entrant where
fairscale is installed, an error where it is not. Another function takes its place in the modules that use it, as they
are imported. Nothing of mmdet is imported for that.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

FOLDER = 'mmdet.models.layers.transformer'
NAME = 'checkpoint_wrapper'


def install_num_cp() -> None:
    """Let ``num_cp`` recompute by mmzero, in modules of mmdet that are imported already and in those that will be.

    Safe to call any number of times.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(f'{FOLDER}.'):
            replace_wrapper(module)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def replace_wrapper(module: ModuleType) -> None:
    """Put mmzero's function in the place of fairscale's, or of the None where that is missing.

    Args:
        module (ModuleType): A module of mmdet.
    """
    from mmzero.patches.num_cp import recompute_for_now

    if hasattr(module, NAME):
        setattr(module, NAME, recompute_for_now)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules of mmdet's transformers as Python does, and changes them once they have run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f'{FOLDER}.'):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        replace_wrapper(module)
