"""The gradient norm over shards and whole tensors together."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from mmzero.engines.fsdp2.kinds import by_kind


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
    norms = []
    for group in by_kind(params):
        grads = [param.grad for param in group if param.grad is not None]
        if math.isinf(norm_type):
            norms.append(_largest(grads))
            continue
        norm = get_total_norm(grads, norm_type, foreach=foreach)
        # float() of a sharded norm would be this rank's own.
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _largest(grads: list[Tensor]) -> Tensor:
    """The largest absolute value. torch's own fails on a rank whose shard of a gradient is empty."""
    local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    values = [grad.abs().max().float() for grad in local if grad.numel()]
    largest = torch.stack(values).max() if values else torch.zeros((), device=local[0].device)
    # Whether MAX hands on a NaN is up to the backend.
    pair = torch.stack([largest.nan_to_num(nan=0.0, posinf=math.inf), largest.isnan().float()])
    dist.all_reduce(pair, op=dist.ReduceOp.MAX)
    return torch.where(pair[1] > 0, torch.full_like(pair[0], math.nan), pair[0])
