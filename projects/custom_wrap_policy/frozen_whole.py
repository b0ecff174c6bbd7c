"""A wrap policy of one's own: what is frozen is gathered in large pieces, what trains block by block."""

from torch import nn

from mmzero.policies import AutoPolicy, Choice, WrapPolicy, ineligible
from mmzero.registry import WRAP_POLICIES


@WRAP_POLICIES.register_module()
class FrozenWholePolicy(WrapPolicy):
    """AutoPolicy's units, but one for each frozen part of the model.

    Frozen parameters are gathered and never reduced: cutting them into blocks only costs more all-gathers. A part is
    the outermost module of which nothing trains and which may be a unit.

    Args:
        min_params (int): A frozen part with fewer parameters is not worth a collective. Defaults to 1,000.
        max_params (int): A frozen part with more parameters stays cut into blocks, since a unit is whole in memory
            while it computes. Defaults to 50 million.
    """

    def __init__(self, min_params: int = 1_000, max_params: int = 50_000_000) -> None:
        self.min_params, self.max_params = min_params, max_params

    def choose(self, model: nn.Module) -> Choice:
        """See :class:`mmzero.policies.WrapPolicy`."""
        blocks = AutoPolicy().choose(model)
        parts = list(self._frozen_parts(model, '', ineligible(model)))
        units = [
            name for name in blocks.units if not any(name == part or name.startswith(f'{part}.') for part in parts)
        ]
        return Choice((*parts, *units), (*blocks.notes, f'frozen, in one piece each: {", ".join(parts) or "nothing"}'))

    def _frozen_parts(self, module: nn.Module, name: str, cannot_be_units: dict[str, str]):
        params = list(module.parameters())
        is_frozen = params and not any(param.requires_grad for param in params)
        fits = self.min_params <= sum(param.numel() for param in params) <= self.max_params
        if name and is_frozen and fits and name not in cannot_be_units:
            yield name
            return
        for child_name, child in module.named_children():
            yield from self._frozen_parts(child, f'{name}.{child_name}'.lstrip('.'), cannot_be_units)

    def __str__(self) -> str:
        return f'FrozenWholePolicy({self.min_params:,} to {self.max_params:,} parameters)'
