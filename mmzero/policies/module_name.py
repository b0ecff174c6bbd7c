"""Units by the qualified name of a module."""

from collections.abc import Sequence

from torch import nn
from typing_extensions import override

from mmzero.errors import PlanError, near_names
from mmzero.policies.eligible import has_no_forward
from mmzero.policies.patterns import matches
from mmzero.policies.policy import Choice, WrapPolicy
from mmzero.registry import WRAP_POLICIES


@WRAP_POLICIES.register_module()
class ModuleNamePolicy(WrapPolicy):
    """Every module whose qualified name matches a pattern is a unit.

    Args:
        names (Sequence[str]): Patterns, segment by segment: ``*`` is any part of one segment, ``**`` any number of
            segments, so that ``backbone.layers.*`` names the layers and not what is in them.

    Raises:
        ValueError: If no pattern is given.
        PlanError: When called with a model in which a pattern names nothing, or only what has no forward.
    """

    def __init__(self, names: Sequence[str]) -> None:
        patterns = list(names) if isinstance(names, Sequence) and not isinstance(names, str) else []
        if not patterns or not all(isinstance(name, str) and name for name in patterns):
            raise ValueError(f"names: expected a list of patterns, such as ['backbone.layers.*']; got {names!r}")
        self.names = tuple(patterns)

    @override
    def choose(self, model: nn.Module) -> Choice:
        modules = {name: module for name, module in model.named_modules() if name}
        filled = [name for name, module in modules.items() if next(module.parameters(), None) is not None]
        found = {pattern: [name for name in filled if matches(pattern, name)] for pattern in self.names}
        missing = [pattern for pattern, names in found.items() if not names]
        if missing:
            hints = ' '.join(f'{pattern!r}{near_names(pattern, filled)}' for pattern in missing)
            raise PlanError(f'no module of {type(model).__name__} with parameters is named {hints}')
        units = [name for name in filled if any(name in names for names in found.values())]
        for pattern, names in found.items():
            if all(has_no_forward(modules[name]) for name in names):
                raise PlanError(
                    f'{pattern!r} names {names[0]}, a {type(modules[names[0]]).__name__}, which has no forward of its '
                    f"own; name what is in it, such as '{names[0]}.*'"
                )
        units = [name for name in units if not has_no_forward(modules[name])]
        return Choice(tuple(units))

    @override
    def __str__(self) -> str:
        return f'ModuleNamePolicy({", ".join(self.names)})'
