"""Units by the class of a module."""

from collections.abc import Sequence

from torch import nn

from mmzero.errors import PlanError, near_names
from mmzero.policies.plan import WrapPlan, make_plan
from mmzero.registry import WRAP_POLICIES


@WRAP_POLICIES.register_module()
class ModuleClassPolicy:
    """Every module of one of the given classes is a unit.

    Good units are the repeated blocks of a backbone, encoder or decoder: modules that run on every rank,
    every step, through their own forward. Each unit costs one all-gather in forward and one in backward at
    stage 3, and one reduce-scatter; while it computes, its whole weights are in memory.

    Args:
        classes (Sequence[str]): Class names, such as 'SwinBlock'. Subclasses count. Classes are named, not
            imported, so that a config works without the package that defines them.

    Raises:
        PlanError: When called with a model in which a class does not occur.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        if isinstance(classes, str) or not all(isinstance(name, str) for name in classes):
            raise ValueError(f'classes: expected a list of class names; got {classes!r}')
        self.classes = tuple(classes)

    def __call__(self, model: nn.Module) -> WrapPlan:
        """Choose the units.

        Args:
            model (nn.Module): The model; its parameters may be on the meta device.

        Returns:
            WrapPlan: The plan.
        """
        bases = {name: _class_names(module) for name, module in model.named_modules() if name}
        present = set().union(*bases.values()) if bases else set()
        missing = [name for name in self.classes if name not in present]
        if missing:
            known = {type(module).__name__ for module in model.modules()}
            hints = ' '.join(f'{name!r}{near_names(name, known)}' for name in missing)
            raise PlanError(f'no module of {type(model).__name__} is of the class {hints}')
        units = [name for name, classes in bases.items() if classes.intersection(self.classes)]
        return make_plan(model, units, f'ModuleClassPolicy({", ".join(self.classes)})')


def _class_names(module: nn.Module) -> set[str]:
    return {base.__name__ for base in type(module).__mro__}
