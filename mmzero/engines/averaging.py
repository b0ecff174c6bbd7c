"""Averaging gradients at the step, where the model's code decides what is called when.

[Note: without DDP]
DistributedDataParallel averages gradients within backward, of what its own forward has announced. A GAN's step does
what it does not expect: two backwards after two forwards (the second one's gradients stay each rank's own, without a
word), a network frozen in one of two passes while another one accumulates ("marked ready twice"), a network entered by
a method. So gradients are averaged once, when their optimizer is about to step, whatever led to them. The price is that
communication does not overlap with backward.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 25 * 2**20


def average_gradients(params: Sequence[nn.Parameter], device: torch.device) -> None:
    """Average gradients over all ranks; one that is on no rank stays none. Collective.

    Communication: an all-reduce of a flag per parameter, then of all gradients, in buckets. Waits for the device.

    Args:
        params (Sequence[nn.Parameter]): The parameters, the same on every rank.
        device (torch.device): Where this rank computes.
    """
    if not params or dist.get_world_size() == 1:
        return
    used = torch.tensor([param.grad is not None for param in params], dtype=torch.int32, device=device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    trained = [param for param, flag in zip(params, used.tolist(), strict=True) if flag]
    for param in trained:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    for bucket in _buckets(param.grad for param in trained if param.grad is not None):
        flat = torch.cat([grad.flatten() for grad in bucket]).div_(dist.get_world_size())
        dist.all_reduce(flat)
        for grad, mean in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(mean.view(grad.shape))


def _buckets(grads: Iterable[Tensor]) -> list[list[Tensor]]:
    """Gradients of one dtype, up to the size of DDP's buckets."""
    buckets: list[list[Tensor]] = []
    open_buckets: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for grad in grads:
        bucket = open_buckets[grad.dtype]
        bucket.append(grad.detach())
        if sum(other.nbytes for other in bucket) >= BUCKET_BYTES:
            buckets.append(open_buckets.pop(grad.dtype))
    return buckets + list(open_buckets.values())
