"""Applying the patches to a model."""

from collections import Counter
from collections.abc import Callable, Sequence

from torch import nn

from mmzero.errors import PlanError, near_names
from mmzero.patches.checkpoint import Undo, checkpoint_module
from mmzero.registry import CHECKPOINT_PATCHES


class Applied:
    """What was patched.

    Args:
        counts (Counter): Number of patched modules by class name.
        left (tuple[str, ...]): Classes of blocks with ``with_cp=True`` for which no patch is registered; they
            keep the re-entrant checkpointing of their own.
        undos (Sequence[Callable]): What takes the changes back.
    """

    def __init__(self, counts: Counter, left: tuple[str, ...], undos: Sequence[Undo]) -> None:
        self.counts = counts
        self.left = left
        self._undos = list(undos)

    def undo(self) -> None:
        """Take all changes back."""
        while self._undos:
            self._undos.pop()()

    def __str__(self) -> str:
        return ', '.join(f'{count} x {name}' for name, count in sorted(self.counts.items())) or 'nothing'


def apply_patches(model: nn.Module, names: Sequence[str] = ()) -> Applied:
    """Turn on activation checkpointing where the model or the user asks for it.

    Blocks of a registered class with ``with_cp=True`` are found by themselves; other modules are named.

    Args:
        model (nn.Module): The model, before sharding.
        names (Sequence[str]): Paths of further modules. Defaults to none.

    Returns:
        Applied: What matched.

    Raises:
        PlanError: If a name is not in the model, or a module's forward was replaced already; nothing is
            patched then.
    """
    counts: Counter = Counter()
    undos: list[Undo] = []
    modules = dict(model.named_modules())
    for name in names:
        if not name or name not in modules:
            raise PlanError(
                f'activation_checkpointing: {type(model).__name__} has no module {name!r}'
                f'{near_names(name, filter(None, modules))}'
            )
    try:
        for name, module in modules.items():
            patch = patch_of(module)
            undo = patch(module) if patch is not None else None
            if undo is None and name in names:
                undo = checkpoint_module(module)
            if undo is not None:
                counts[type(module).__name__] += 1
                undos.append(undo)
    except ValueError as error:
        Applied(counts, (), undos).undo()
        raise PlanError(f'activation_checkpointing: {name!r}: {error}') from None
    return Applied(counts, _unpatched(model), undos)


def _unpatched(model: nn.Module) -> tuple[str, ...]:
    left = set()
    for module in model.modules():
        inner = any(hasattr(child, 'with_cp') for child in module.modules() if child is not module)
        if getattr(module, 'with_cp', False) and not inner:
            left.add(type(module).__name__)
    return tuple(sorted(left))


def patch_of(module: nn.Module) -> Callable[[nn.Module], Undo | None] | None:
    """Find the patch for a module by its class or the nearest base class that has one.

    Args:
        module (nn.Module): The module.

    Returns:
        Callable or None: The patch.
    """
    for base in type(module).__mro__:
        patch = CHECKPOINT_PATCHES.get(base.__name__) if base.__name__ in _names() else None
        if patch is not None:
            return patch
    return None


def _names() -> dict:
    return CHECKPOINT_PATCHES.module_dict
