"""What every wrap policy is."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from torch import nn

from mmzero.policies.eligible import doubts_about, faults_of
from mmzero.policies.plan import WrapPlan, make_plan, with_methods
from mmzero.policies.reach import entered_by, reaches


@dataclass(frozen=True)
class Choice:
    """The modules that a policy wants as units.

    Args:
        units (tuple[str, ...]): Their paths in the model.
        notes (tuple[str, ...]): Why, a line per group of modules; shown with the plan.
        hints (tuple[str, ...]): What could be chosen besides; shown where no other policy adds to this choice.
    """

    units: tuple[str, ...]
    notes: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ('units', 'notes', 'hints'):
            value = getattr(self, name)
            if not isinstance(value, (tuple, list)) or not all(isinstance(item, str) for item in value):
                raise ValueError(f'Choice.{name}: expected a tuple of strings, paths of modules; got {value!r}'[:500])


class WrapPolicy(ABC):
    """Chooses which modules of a model are units. Pure: it neither changes nor runs the model."""

    @abstractmethod
    def choose(self, model: nn.Module) -> Choice:
        """Choose the units.

        Args:
            model (nn.Module): The model; its parameters may be on the meta device.

        Returns:
            Choice: The units, without the root.

        Raises:
            PlanError: If what the policy names is not in the model.
        """

    @abstractmethod
    def __str__(self) -> str:
        """The policy as tables and errors name it."""

    def __call__(self, model: nn.Module) -> WrapPlan:
        """Plan the units of a model.

        Args:
            model (nn.Module): The model; its parameters may be on the meta device.

        Returns:
            WrapPlan: The plan; its ``faults`` name units that the model's code cannot do with.

        Raises:
            PlanError: If the policy does not fit the model.
        """
        choice = self.choose(model)
        if not isinstance(choice, Choice):
            raise ValueError(f'{self}: choose returned a {type(choice).__name__}; expected a Choice')
        plan = make_plan(model, choice.units, str(self), choice.notes)
        found = reaches(model)
        names = [unit.name for unit in plan.units if unit.name]
        plan = with_methods(plan, entered_by(model, found, names))
        notes = (*choice.notes, *doubts_about(model, found, names), *choice.hints)
        return replace(plan, notes=notes, faults=faults_of(model, found, names))
