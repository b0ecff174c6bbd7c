"""Units by the class of a module."""

from collections.abc import Iterator, Sequence

from torch import nn
from typing_extensions import override

from mmzero.errors import PlanError, near_names
from mmzero.policies.policy import Choice, WrapPolicy
from mmzero.registry import WRAP_POLICIES


@WRAP_POLICIES.register_module()
class ModuleClassPolicy(WrapPolicy):
    """Every module of one of the given classes is a unit.

    Good units are the repeated blocks of a backbone, encoder or decoder: modules that run on every rank,
    every step, through their own forward. Each unit costs one all-gather in forward and one in backward at
    stage 3, and one reduce-scatter; while it computes, its whole weights are in memory.

    Args:
        classes (Sequence[str]): Class names, such as 'SwinBlock'. Subclasses count. Classes are named, not
            imported, so that a config works without the package that defines them.

    Raises:
        ValueError: If no class is named.
        PlanError: When called with a model in which a class does not occur, or holds no parameters.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        names = list(classes) if isinstance(classes, Sequence) and not isinstance(classes, str) else []
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f'classes: expected a list of class names; got {classes!r}')
        self.classes = tuple(names)

    @override
    def choose(self, model: nn.Module) -> Choice:
        modules = {name: module for name, module in model.named_modules() if name}
        bases = {name: _class_names(module) for name, module in modules.items()}
        self._check_present(model, modules, bases)
        units = [name for name, classes in bases.items() if classes.intersection(self.classes)]
        return Choice(tuple(units))

    @override
    def __str__(self) -> str:
        return f'ModuleClassPolicy({", ".join(self.classes)})'

    def _check_present(self, model: nn.Module, modules: dict[str, nn.Module], bases: dict[str, set[str]]) -> None:
        present = set().union(*bases.values())
        missing = [name for name in self.classes if name not in present]
        if missing:
            raise PlanError('; '.join(_why_missing(missing, model, modules)))
        filled = set().union(*(bases[name] for name, module in modules.items() if _has_parameters(module)))
        empty = [name for name in self.classes if name not in filled]
        if empty:
            raise PlanError(f'modules of the class {", ".join(map(repr, empty))} hold no parameters; leave it out')


def _why_missing(missing: list[str], model: nn.Module, modules: dict[str, nn.Module]) -> Iterator[str]:
    own = _class_names(model)
    for name in missing:
        if name in own:
            yield f'{name!r} is the class of the model itself, which is always the root unit; leave it out of classes'
    known = {type(module).__name__ for module in modules.values()}
    hints = ' '.join(f'{name!r}{near_names(name, known)}' for name in missing if name not in own)
    if hints:
        yield f'no module of {type(model).__name__} is of the class {hints}'


def _class_names(module: nn.Module) -> set[str]:
    return {base.__name__ for base in type(module).__mro__}


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
