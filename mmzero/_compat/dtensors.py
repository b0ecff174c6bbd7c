"""The tensors that DTensors are."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

local_tensor: Callable[[Any], torch.Tensor] = operator.attrgetter('_local_tensor')
"""The tensor that a shard (DTensor) is on this rank, the same object each time.

``DTensor.to_local`` makes a new view of a parameter in every call. Remove once it does not.
"""


def dtensor_as_it_is(local: torch.Tensor, like: Any) -> Any:
    """Make a shard of a tensor that stays where it is, and the tensor that it is.

    ``DTensor.from_local`` moves it to the device of the mesh. Remove once it can be told not to.

    Args:
        local (Tensor): What this rank holds.
        like (DTensor): A shard of the same whole shape, mesh and placements; the dtype may be another.

    Returns:
        DTensor: The shard.
    """
    meta = TensorMeta(like.shape, like.stride(), local.dtype)
    return DTensor(local, DTensorSpec(like.device_mesh, like.placements, meta), requires_grad=False)
