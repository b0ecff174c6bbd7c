"""What one optimizer step is asked to do, and what it did."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Clip:
    """How gradients are clipped.

    Args:
        by (str): 'norm' for ``torch.nn.utils.clip_grad_norm_``, 'value' for ``clip_grad_value_``.
        options (dict): Their arguments without the parameters.
    """

    by: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepOptions:
    """What one optimizer step does besides stepping.

    Args:
        clip (Clip, optional): How gradients are clipped. Defaults to None: not at all.
        skip_nonfinite (bool): Whether nothing moves where a gradient of any rank is not finite; in float16 it never
            does. Costs nothing where gradients are clipped by norm, else one all-reduce of a scalar, and the host
            waits for it. Defaults to False.
        parts (Mapping[str, Sequence[nn.Parameter]]): Parts of the model whose own norms are wanted, by name. One
            all-reduce for all of them.
    """

    clip: Clip | None = None
    skip_nonfinite: bool = False
    parts: Mapping[str, Sequence[nn.Parameter]] = field(default_factory=dict)


@dataclass(frozen=True)
class StepOutcome:
    """What one optimizer step did; the same on every rank.

    Args:
        norm (float, optional): Where gradients are clipped by their norm, the norm before clipping that DDP would see;
            None otherwise, and where no parameter has a gradient.
        norms (dict[str, float]): Norms before clipping of the parts that were asked for.
        skipped (str, optional): Why nothing moved: which gradients are not finite. None where the optimizer stepped.
    """

    norm: float | None = None
    norms: dict[str, float] = field(default_factory=dict)
    skipped: str | None = None
