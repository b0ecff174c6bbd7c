"""What a class of modules says about its activation checkpointing."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from mmzero.registry import CHECKPOINT_PATCHES

Undo = Callable[[], None]
"""Takes a change back."""


class CheckpointPatch:
    """How modules of a class ask for checkpointing, and how they are recomputed.

    Registered in :data:`mmzero.registry.CHECKPOINT_PATCHES` under the names of classes, and found by the class of a
    module or the nearest of its bases that is registered; 'timm.Block' is a Block of the package timm alone. This base
    is what modules without a patch get: they never ask, and their forward is recomputed as it was called.

    Attributes:
        methods (Sequence[str]): Methods other than forward that are recomputed, too, where the module has them.
    """

    methods: Sequence[str] = ()

    def asks_for(self, module: nn.Module) -> Sequence[nn.Module]:
        """Find what is to be recomputed because an option of the module itself says so.

        Args:
            module (nn.Module): A module of the class.

        Returns:
            Sequence[nn.Module]: The module, or modules below it; none where the option is off.
        """
        return ()

    def turn_off(self, module: nn.Module) -> Undo:
        """Turn the module's own checkpointing off, since the forward is recomputed without it.

        Args:
            module (nn.Module): One that asks.

        Returns:
            Callable[[], None]: Takes the change back.
        """
        return lambda: None

    def arguments(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Change the arguments of a forward that will be run a second time.

        Args:
            module (nn.Module): The module that is recomputed.
            args (tuple): Positional arguments.
            kwargs (dict): Keyword arguments.

        Returns:
            tuple[tuple, dict]: What to call it with, such as without a cache that each run would add to.
        """
        return args, kwargs


def undo_all(undos: Sequence[Undo]) -> Undo:
    """Make one of several.

    Args:
        undos (Sequence[Callable]): Each takes a change back.

    Returns:
        Callable[[], None]: Takes all of them back, the last first.
    """

    def undo() -> None:
        for undo in reversed(undos):
            undo()

    return undo


def set_attribute(module: Any, name: str, value: Any) -> Undo:
    """Set an attribute of a module.

    Args:
        module (Any): The module, or what holds its options.
        name (str): Of an attribute that it has.
        value (Any): What to set.

    Returns:
        Callable[[], None]: Sets it back.
    """
    before = getattr(module, name)
    setattr(module, name, value)

    def undo() -> None:
        setattr(module, name, before)

    return undo


_NO_PATCH = CheckpointPatch()


def patch_of(module: nn.Module) -> CheckpointPatch:
    """Find the patch for a module by its class or the nearest base class that has one.

    Args:
        module (nn.Module): The module.

    Returns:
        CheckpointPatch: The patch; one that asks for nothing where none is registered.
    """
    known = CHECKPOINT_PATCHES.module_dict
    for base in type(module).__mro__:
        package = base.__module__.partition('.')[0]
        for name in (f'{package}.{base.__name__}', base.__name__):
            if name in known:
                return known[name]()
    return _NO_PATCH
