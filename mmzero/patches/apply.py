"""Applying the patches to a model."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from mmzero.config import CheckpointingConfig
from mmzero.errors import PlanError, near_names
from mmzero.patches.checkpoint import DEFAULT, Region, checkpoint_module
from mmzero.patches.offload import OffloadToHost
from mmzero.patches.patch import Undo, patch_of
from mmzero.patches.switch import SWITCHES, switches_on


class Applied:
    """What was patched.

    Args:
        counts (Counter): Number of patched modules by class name.
        left (tuple[str, ...]): Classes of modules with ``with_cp=True`` or its like for which no patch is registered;
            they keep the checkpointing of their own.
        undos (Sequence[Callable]): What takes the changes back.
        regions (Mapping[str, Region]): How each patched module is recomputed, by its path.
        how (str): What is kept, and where.
    """

    def __init__(
        self,
        counts: Counter,
        left: tuple[str, ...],
        undos: Sequence[Undo],
        regions: Mapping[str, Region] | None = None,
        how: str = '',
    ) -> None:
        self.counts = counts
        self.left = left
        self.regions = dict(regions or {})
        self._undos = list(undos)
        self._how = how

    def undo(self) -> None:
        """Take all changes back."""
        while self._undos:
            self._undos.pop()()

    def never_run(self) -> tuple[str, ...]:
        """Find what was patched to no effect so far.

        Returns:
            tuple[str, ...]: Paths of modules whose forward was not called with gradients.
        """
        return tuple(name for name, region in self.regions.items() if not region.has_run)

    def __str__(self) -> str:
        found = ', '.join(f'{count} x {name}' for name, count in sorted(self.counts.items())) or 'nothing'
        return f'{found}{self._how}' if self.counts else found


def apply_patches(model: nn.Module, config: CheckpointingConfig = DEFAULT, chosen: Sequence[str] = ()) -> Applied:
    """Turn on activation checkpointing where the model or the user asks for it.

    Modules of a registered class that ask for it by an option of their own are found by themselves; others are
    named.

    Args:
        model (nn.Module): The model, before sharding.
        config (CheckpointingConfig): Names of further modules, and what is kept. Its policy is not asked.
        chosen (Sequence[str]): Paths of what its policy has chosen. Defaults to none.

    Returns:
        Applied: What matched.

    Raises:
        PlanError: If a name is not in the model, a module's forward was replaced already, or a dict of settings
            matches nothing; nothing is patched then.
    """
    modules = dict(model.named_modules())
    missing = [name for name in config.modules if not name or name not in modules]
    if missing:
        near = (f'has no module {name!r}{near_names(name, filter(None, modules))}' for name in missing)
        raise PlanError(f'activation_checkpointing: {type(model).__name__} {"; ".join(near)}')
    wanted = {modules[name] for name in (*config.modules, *chosen)}
    # All are asked before any is changed: what a module asks for depends on the options of those below it.
    asked = {module: patch_of(module).asks_for(module) for module in modules.values()}
    wanted.update(found for each in asked.values() for found in each)
    if config.is_asked and not wanted:
        raise PlanError(f'activation_checkpointing: {_nothing_asks(model)}')
    undos: list[Undo] = [patch_of(module).turn_off(module) for module, found in asked.items() if found]
    counts: Counter = Counter()
    regions: dict[str, Region] = {}
    host = OffloadToHost()
    try:
        for name, module in modules.items():
            if module in wanted:
                regions[name], undo = checkpoint_module(module, config, patch=patch_of(module), host=host)
                counts[type(module).__name__] += 1
                undos.append(undo)
    except ValueError as error:
        Applied(counts, (), undos).undo()
        raise PlanError(f'activation_checkpointing: {name!r}: {error}') from None
    return Applied(counts, _unpatched(model, wanted), undos, regions, _how(config))


def _nothing_asks(model: nn.Module) -> str:
    left = _unpatched(model, set())
    why = f'no patch is registered for {", ".join(left)} with with_cp=True' if left else 'no block has with_cp=True'
    return (
        f'matches nothing in this {type(model).__name__}: {why}, and it names neither modules nor a policy; add '
        "policy='AutoPolicy' for the blocks that wrap_policy would find, or modules=[...], or remove it"
    )


def _how(config: CheckpointingConfig) -> str:
    kept = dict(inputs='', matmuls=', keeping outputs of matrix products and attention', all=', recomputing nothing')
    return kept[config.save] + (', what is kept goes to pinned host memory' if config.offload else '')


def _unpatched(model: nn.Module, recomputed: Iterable[nn.Module]) -> tuple[str, ...]:
    # transformers sets its option in any module that has it, such as T5's attention, where nothing acts on it.
    inside = {child for module in recomputed for child in module.modules()}
    left = set()
    for module in model.modules():
        # One that has such modules below it only hands its option on to them.
        inner = any(hasattr(child, name) for child in module.modules() if child is not module for name in _TELLING)
        on = set(switches_on(module)) - ({'gradient_checkpointing'} if module in inside else set())
        if on & set(_TELLING) and not inner and any(True for _ in module.parameters()):
            left.add(type(module).__name__)
    return tuple(sorted(left))


# A name that is common elsewhere does not tell.
_TELLING = tuple(name for name in SWITCHES if name != 'memory_efficient')
