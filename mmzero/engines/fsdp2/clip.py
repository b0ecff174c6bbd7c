"""The gradient norm over shards and whole tensors together."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from mmzero.engines.fsdp2.kinds import by_kind
from mmzero.engines.gradients import norms_by_part
from mmzero.engines.on_host import device_of, is_on_host


def total_norm(params: list[nn.Parameter], norm_type: float = 2.0, foreach: bool | None = None) -> Tensor:
    """The gradient norm that an unsharded model would have.

    ``torch.nn.utils.clip_grad_norm_`` fails on a mixture of shards and whole tensors; its first half works per kind.
    Communication: one all-reduce of a scalar per kind of sharding.

    Args:
        params (list[nn.Parameter]): Parameters with gradients.
        norm_type (float): p of the p-norm. Defaults to 2.
        foreach (bool, optional): As torch's argument. Defaults to None.

    Returns:
        Tensor: The norm, 0-dim, the same on every rank.
    """
    norms: list[Tensor] = []
    for group in by_kind(params):
        grads: list[Any] = [param.grad for param in group if param.grad is not None]
        if math.isinf(norm_type):
            norms.append(_largest(grads))
            continue
        if is_on_host(grads[0]):
            norms.append(norms_by_part(dict(all=group), norm_type, device_of(grads[0].device_mesh))['all'])
            continue
        norm = get_total_norm(grads, norm_type, foreach=foreach)
        # float() of a sharded norm would be this rank's own.
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _largest(grads: list[Tensor]) -> Tensor:
    """The largest absolute value. torch's own fails on a rank whose shard of a gradient is empty."""
    local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    values = [grad.abs().max().float() for grad in local if grad.numel()]
    device = device_of(grads[0].device_mesh) if isinstance(grads[0], DTensor) else grads[0].device
    largest = torch.stack(values).max().to(device) if values else torch.zeros((), device=device)
    # Whether MAX hands on a NaN is up to the backend.
    pair = torch.stack([largest.nan_to_num(nan=0.0, posinf=math.inf), largest.isnan().float()])
    dist.all_reduce(pair, op=dist.ReduceOp.MAX)
    value, has_nan = pair.unbind()
    return torch.where(has_nan > 0, torch.full_like(value, math.nan), value)
