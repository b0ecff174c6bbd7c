"""Units by their number of parameters."""

from torch import nn
from typing_extensions import override

from mmzero.errors import PlanError
from mmzero.policies.eligible import ineligible
from mmzero.policies.policy import Choice, WrapPolicy
from mmzero.policies.tied import without_tied
from mmzero.registry import WRAP_POLICIES


@WRAP_POLICIES.register_module()
class SizePolicy(WrapPolicy):
    """Modules between a least and a most number of parameters are units, as large as they may be.

    Each unit costs an all-gather in forward, one in backward at stage 3, and a reduce-scatter, each with a latency
    that does not depend on its size, and hides the next one behind its computation: fewer, larger units are faster.
    At the peak the root unit and two consecutive units are gathered at once: more, smaller ones are leaner. Where a
    model has repeated blocks, AutoPolicy finds a better cut than a size does.

    Modules that cannot be units, such as heads, are left out (:func:`mmzero.policies.eligible.ineligible`), and so
    are those that share a tied parameter.

    Args:
        min_params (int): The least number of parameters of a unit; what has fewer is left to what holds it.
        max_params (int, optional): The most; what has more is divided among its children, whose remainder is a unit
            of its own where it has ``min_params``. A module that has no children with parameters stays whole.
            Defaults to None: ten times ``min_params``.

    Raises:
        ValueError: If the numbers are not positive integers in order.
        PlanError: When called with a model of which no module fits.
    """

    def __init__(self, min_params: int = 10**6, max_params: int | None = None) -> None:
        for name, value in dict(min_params=min_params, max_params=1 if max_params is None else max_params).items():
            if type(value) is not int or value < 1:
                raise ValueError(f'{name}: expected a positive integer; got {value!r}')
        most = 10 * min_params if max_params is None else max_params
        if most < min_params:
            raise ValueError(f'max_params: expected at least min_params, {min_params}; got {most}')
        self.min_params, self.max_params = min_params, most

    @override
    def choose(self, model: nn.Module) -> Choice:
        units: list[str] = []
        self._divide(model, '', ineligible(model), units)
        units, tied = without_tied(model, units)
        if not units:
            raise PlanError(
                f'{self}: no module of {type(model).__name__} that can be a unit has at least {self.min_params:,} '
                'parameters; lower min_params'
            )
        return Choice(tuple(units), tuple(tied))

    def _divide(self, module: nn.Module, name: str, reasons: dict[str, str], units: list[str]) -> int:
        """Choose units in a module; returns the parameters that they hold."""
        numel = sum(param.numel() for param in module.parameters())
        may_be = bool(name) and name not in reasons
        if may_be and self.min_params <= numel <= self.max_params:
            units.append(name)
            return numel
        if numel < self.min_params:
            return 0
        taken = sum(
            self._divide(child, f'{name}.{child_name}'.lstrip('.'), reasons, units)
            for child_name, child in module.named_children()
        )
        if may_be and numel - taken >= self.min_params:
            units.append(name)
            return numel
        return taken

    @override
    def __str__(self) -> str:
        return f'SizePolicy({self.min_params:,} to {self.max_params:,} parameters)'
