"""Policies made of policies."""

from collections.abc import Sequence

from torch import nn
from typing_extensions import override

from mmzero.errors import PlanError
from mmzero.policies.policy import Choice, WrapPolicy
from mmzero.registry import WRAP_POLICIES


class Combined(WrapPolicy):
    """A policy made of several.

    Args:
        policies (Sequence[WrapPolicy]): The policies; in a config names, dicts or callables, as in ``wrap_policy``.

    Raises:
        ValueError: If there is none.
    """

    def __init__(self, policies: Sequence[WrapPolicy]) -> None:
        is_list = isinstance(policies, Sequence) and not isinstance(policies, str)
        if not is_list or not policies or not all(isinstance(policy, WrapPolicy) for policy in policies):
            raise ValueError(f'policies: expected a list of policies; got {policies!r}')
        self.policies = list(policies)

    @override
    def __str__(self) -> str:
        return f'{type(self).__name__}({", ".join(map(str, self.policies))})'


@WRAP_POLICIES.register_module()
class AnyOf(Combined):
    """What at least one of some policies makes a unit is one. A list in the config means the same.

    Args:
        policies (Sequence[WrapPolicy]): The policies; in a config names, dicts or callables, as in ``wrap_policy``.

    Raises:
        ValueError: If none is given, or one of them is :class:`Not`, which would make all else a unit.
    """

    def __init__(self, policies: Sequence[WrapPolicy]) -> None:
        super().__init__(policies)
        if any(isinstance(policy, Not) for policy in self.policies):
            raise ValueError('policies: Not takes away from others and belongs into AllOf')

    @override
    def choose(self, model: nn.Module) -> Choice:
        choices = [policy.choose(model) for policy in self.policies]
        units = dict.fromkeys(name for choice in choices for name in choice.units)
        return Choice(tuple(units), tuple(note for choice in choices for note in choice.notes))


@WRAP_POLICIES.register_module()
class AllOf(Combined):
    """What all of some policies make a unit is one: ``AllOf(['AutoPolicy', Not(...)])``.

    Args:
        policies (Sequence[WrapPolicy]): The policies; in a config names, dicts or callables, as in ``wrap_policy``.

    Raises:
        ValueError: If none is given, or none but :class:`Not`.
        PlanError: When called with a model in which they have no unit in common.
    """

    def __init__(self, policies: Sequence[WrapPolicy]) -> None:
        super().__init__(policies)
        if all(isinstance(policy, Not) for policy in self.policies):
            raise ValueError("policies: expected one that chooses, beside Not, such as 'AutoPolicy'")

    @override
    def choose(self, model: nn.Module) -> Choice:
        chosen = [policy.choose(model) for policy in self.policies if not isinstance(policy, Not)]
        denied = {name for policy in self.policies if isinstance(policy, Not) for name in policy.denied(model)}
        common = set.intersection(*(set(choice.units) for choice in chosen)) - denied
        if not common:
            raise PlanError(f'{self}: the policies have no unit in common')
        units = [name for name in chosen[0].units if name in common]
        return Choice(tuple(units), tuple(note for choice in chosen for note in choice.notes))


@WRAP_POLICIES.register_module()
class Not(WrapPolicy):
    """Within AllOf: what a policy makes a unit is none.

    Args:
        policy (WrapPolicy): The policy; in a config a name, a dict or a callable, as in ``wrap_policy``.

    Raises:
        ValueError: If it is no policy.
    """

    def __init__(self, policy: WrapPolicy) -> None:
        if not isinstance(policy, WrapPolicy):
            raise ValueError(f'policy: expected a policy; got {policy!r}')
        self.policy = policy

    def denied(self, model: nn.Module) -> tuple[str, ...]:
        """The modules that are not to be units.

        Args:
            model (nn.Module): The model.

        Returns:
            tuple[str, ...]: Their paths.
        """
        return self.policy.choose(model).units

    @override
    def choose(self, model: nn.Module) -> Choice:
        raise PlanError(f"{self} alone would make all else a unit; write AllOf(['AutoPolicy', {self}])")

    @override
    def __str__(self) -> str:
        return f'Not({self.policy})'
