"""What one optimizer step is asked to do, and what it did."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mmzero.config import LossScale


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
class Training:
    """What a run says of its steps, for engines whose own config may say it too.

    Args:
        micro_batches (int): Per optimizer step. Defaults to 1.
        clip (Clip, optional): How gradients are clipped. Defaults to None: not at all.
        dtype (torch.dtype, optional): Of the forward's autocast. Defaults to None: none.
        loss_scale (LossScale, optional): How the loss is scaled. Defaults to None: it is not.
        optimizer (Mapping[str, Any], optional): Its class's name as ``type``, with its arguments. Defaults to None: not
            known.
        schedulers (Sequence[Mapping[str, Any]], optional): ``param_scheduler``. Defaults to None: not known.
        batch_size (int, optional): Samples of a rank and micro-batch. Defaults to None: not known.
        world_size (int, optional): Number of ranks. Defaults to None: not known.
    """

    micro_batches: int = 1
    clip: Clip | None = None
    dtype: torch.dtype | None = None
    loss_scale: LossScale | None = None
    optimizer: Mapping[str, Any] | None = None
    schedulers: Sequence[Mapping[str, Any]] | None = None
    batch_size: int | None = None
    world_size: int | None = None


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
