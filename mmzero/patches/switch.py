"""Modules that call torch's checkpoint in their own forward where an option of theirs is set."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from mmzero.patches.patch import CheckpointPatch, Undo, patch_of, set_attribute, undo_all

SWITCHES = ('with_cp', 'use_checkpoint', 'grad_checkpointing', 'gradient_checkpointing', 'memory_efficient')
"""Attributes by which modules of OpenMMLab, transformers and timm turn checkpointing of their own on."""


def switches_on(holder: Any) -> tuple[str, ...]:
    """Find which switches are set.

    Args:
        holder (Any): A module, or what holds its options.

    Returns:
        tuple[str, ...]: Names of its attributes that are true; numbers count, other types have another meaning.
    """
    found = {name: getattr(holder, name, False) for name in SWITCHES}
    return tuple(name for name, value in found.items() if isinstance(value, int) and value)


class OwnBlock(CheckpointPatch):
    """A block that recomputes its own forward, or part of it; here it is recomputed whole."""

    def asks_for(self, module: nn.Module) -> Sequence[nn.Module]:
        """As the base says: the block, where a switch of it is set."""
        return (module,) if any(switches_on(holder) for holder in self.holders(module)) else ()

    def turn_off(self, module: nn.Module) -> Undo:
        """As the base says."""
        undos = [set_attribute(holder, name, False) for holder in self.holders(module) for name in switches_on(holder)]
        return undo_all(undos)

    def holders(self, module: nn.Module) -> Sequence[Any]:
        """Say what has the switches.

        Args:
            module (nn.Module): The module.

        Returns:
            Sequence[Any]: The module itself, unless a subclass says otherwise.
        """
        return (module,)


class OwnParts(OwnBlock):
    """A module that recomputes modules below it.

    Attributes:
        parts (tuple[str, ...]): Patterns of their paths, in which an asterisk stands for one name.
    """

    parts: tuple[str, ...] = ()

    def asks_for(self, module: nn.Module) -> Sequence[nn.Module]:
        """As the base says: its parts, or what those ask for that have a switch for themselves."""
        if not super().asks_for(module):
            return ()
        found = [patch_of(part).asks_for(part) if switches_on(part) else (part,) for part in self.find(module)]
        return tuple(asked for each in found for asked in each)

    def find(self, module: nn.Module) -> list[nn.Module]:
        """Find the parts.

        Args:
            module (nn.Module): The module.

        Returns:
            list[nn.Module]: Modules below it, in the order of the model.
        """
        named = [(path, part) for path, part in module.named_modules() if path]
        return [part for path, part in named if any(_fits(path, pattern) for pattern in self.parts)]


def _fits(path: str, pattern: str) -> bool:
    names, wanted = path.split('.'), pattern.split('.')
    return len(names) == len(wanted) and all(map(fnmatchcase, names, wanted))


def parts(*patterns: str) -> type[OwnParts]:
    """Make a patch for modules that recompute modules below them.

    Args:
        *patterns (str): Of the paths of those.

    Returns:
        type[OwnParts]: The patch.
    """
    return type('OwnParts', (OwnParts,), dict(parts=patterns, __doc__=OwnParts.__doc__))
