"""Units by their depth in the tree of modules."""

from torch import nn
from typing_extensions import override

from mmzero.errors import PlanError
from mmzero.policies.eligible import has_no_forward, ineligible
from mmzero.policies.policy import Choice, WrapPolicy
from mmzero.policies.tied import without_tied
from mmzero.registry import WRAP_POLICIES


@WRAP_POLICIES.register_module()
class DepthPolicy(WrapPolicy):
    """Modules at one depth of the tree are units: 1 for the children of the model, 2 for theirs.

    Lists and dicts of modules are no level of their own: ``backbone.layers.0`` is at depth 2 where ``layers`` is a
    ModuleList. Branches that end earlier, and modules that cannot be units, such as heads, stay in the root unit
    (:func:`mmzero.policies.eligible.ineligible`), and so does what shares a tied parameter.

    Args:
        depth (int): The depth.

    Raises:
        ValueError: If it is not a positive integer.
        PlanError: When called with a model in which nothing is so deep that can be a unit.
    """

    def __init__(self, depth: int) -> None:
        if type(depth) is not int or depth < 1:
            raise ValueError(f'depth: expected a positive integer; got {depth!r}')
        self.depth = depth

    @override
    def choose(self, model: nn.Module) -> Choice:
        reasons = ineligible(model)
        found = self._at_depth(model, '', self.depth)
        units, tied = without_tied(model, [name for name in found if name not in reasons])
        left = [f'{name} is no unit: {reasons[name]}' for name in found if name in reasons]
        if not units:
            why = f' ({left[0]})' if left else ''
            raise PlanError(f'{self}: no module of {type(model).__name__} at this depth can be a unit{why}')
        return Choice(tuple(units), (*left, *tied))

    def _at_depth(self, module: nn.Module, name: str, levels: int) -> list[str]:
        found = []
        for child_name, child in module.named_children():
            path = f'{name}.{child_name}'.lstrip('.')
            if next(child.parameters(), None) is None:
                continue
            if has_no_forward(child):
                found += self._at_depth(child, path, levels)
            elif levels == 1:
                found.append(path)
            else:
                found += self._at_depth(child, path, levels - 1)
        return found

    @override
    def __str__(self) -> str:
        return f'DepthPolicy({self.depth})'
