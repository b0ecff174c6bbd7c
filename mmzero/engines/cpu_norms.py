"""Norm layers under autocast on CPUs, as they are on GPUs.

[Note: norms of 16-bit units]
A unit of reduced precision gathers the weights of its norms in 16 bit, too, while what flows between layers, such as a
residual stream, is float32. On CUDA autocast runs norms in float32, whatever they are given. On CPUs they are not on
its list, and refuse an input in float32 with weights of 16 bit. FSDP2 could cast a unit's inputs to 16 bit instead, but
then the residual stream would be rounded in every unit: the loss of a decoder stands twice as far from float32 as
under DDP. So here autocast on CPUs learns it. What stock torch computes stays as it is: only what it refuses changes.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mmzero._compat import without_autocast_on_cpu

_NORMS = ('layer_norm', 'group_norm', 'instance_norm', 'rms_norm')


@cache
def teach_autocast_norms() -> torch.library.Library:
    """Let autocast on CPUs compute in float32 where a norm's input is float32 and its weights are not.

    Once for the process; see :mod:`torch.library`.

    Returns:
        torch.library.Library: The registration, which holds for as long as it lives.
    """
    library = torch.library.Library('aten', 'IMPL')
    for name in _NORMS:
        library.impl(name, _in_float32(getattr(torch.ops.aten, name).default), 'AutocastCPU')
    return library


def _in_float32(norm: Callable) -> Callable:
    def run(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if input.dtype == torch.float32:
            args = tuple(map(_float32, args))
            kwargs = {key: _float32(value) for key, value in kwargs.items()}
        with without_autocast_on_cpu():
            return norm(input, *args, **kwargs)

    return run


def _float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) else value
