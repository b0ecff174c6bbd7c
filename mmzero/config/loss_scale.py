"""How the loss is scaled in float16, so that small gradients do not vanish."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmzero.config.reader import is_number
from mmzero.errors import near_names

ALLOWED = "allowed: 'dynamic', a number above 0, or a dict of torch.amp.GradScaler's arguments"


@dataclass(frozen=True)
class LossScale:
    """What ``optim_wrapper.loss_scale`` asks for.

    Args:
        static (float, optional): The scale of every step. Defaults to None: it grows, and shrinks when gradients
            overflow.
        options (dict): ``init_scale``, ``growth_factor``, ``backoff_factor`` and ``growth_interval`` of
            ``torch.amp.GradScaler``; those left out have torch's defaults.
    """

    static: float | None = None
    options: dict[str, Any] = field(default_factory=dict)


def read_loss_scale(value: Any) -> LossScale:
    """Read ``loss_scale`` as MMEngine's AmpOptimWrapper takes it.

    Args:
        value (str or float or dict, optional): 'dynamic', a fixed scale, or arguments of ``torch.amp.GradScaler``;
            None is 'dynamic'.

    Returns:
        LossScale: What it means.

    Raises:
        ValueError: If it is none of these; says what is allowed.
    """
    if value in (None, 'dynamic'):
        return LossScale()
    if isinstance(value, Mapping):
        for name, given in value.items():
            if name not in _RANGES:
                raise ValueError(f'{name!r} is unknown{near_names(str(name), _RANGES)}')
            fits, range_ = _RANGES[name]
            if not (is_number(given) and fits(given)):
                raise ValueError(f'{name}={given!r}; expected {range_}')
        return LossScale(options=dict(value))
    if is_number(value) and value > 0:
        return LossScale(static=float(value))
    raise ValueError(ALLOWED)


_RANGES = {
    'init_scale': (lambda value: value > 0, 'a number above 0'),
    'growth_factor': (lambda value: value > 1, 'a number above 1'),
    'backoff_factor': (lambda value: 0 < value < 1, 'a number between 0 and 1'),
    'growth_interval': (lambda value: value >= 1 and isinstance(value, int), 'an integer of 1 or more'),
}
