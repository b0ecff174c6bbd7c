"""Norm layers under autocast on CPUs, as they are on GPUs.

[Note: norms of 16-bit units]
A unit of reduced precision gathers the weights of its norms in 16 bit, too, while what flows between layers, such as a
residual stream, is float32. On CUDA autocast runs norms in float32, whatever they are given. On CPUs they are not on
its list, and refuse an input and weights of different dtypes. FSDP2 could cast a unit's inputs to 16 bit instead, but
then the residual stream would be rounded in every unit: the loss of a decoder stands twice as far from float32 as
under DDP. So here such norms run in float32 on CPUs, too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmzero._compat import TorchFunctionMode

_NORMS = {F.layer_norm, F.group_norm, F.instance_norm, F.rms_norm, torch.layer_norm, torch.group_norm, torch.rms_norm}


class Float32Norms(TorchFunctionMode):
    """Within it, norms whose input and weights differ in dtype compute in float32."""

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See :class:`torch.overrides.TorchFunctionMode`."""
        kwargs = kwargs or {}
        if func in _NORMS:
            dtypes = {value.dtype for value in (*args, *kwargs.values()) if isinstance(value, Tensor)}
            if len(dtypes) > 1:
                args = tuple(map(_float32, args))
                kwargs = {key: _float32(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) else value
