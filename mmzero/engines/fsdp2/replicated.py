"""Parameters that FSDP2 cannot shard, kept whole on every rank, their gradients averaged by one all-reduce."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn


class ReplicatedParameters:
    """0-dim parameters, such as mmcv's Scale or a logit scale, and those of another dtype than their unit's.

    Args:
        params (Sequence[nn.Parameter]): The parameters, the same on every rank.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = params

    def reduce_gradients(self, only: set[int] | None = None) -> None:
        """Average the gradients over all ranks; one used on no rank keeps none. Collective, once per step.

        Communication: one all-reduce of all of them, in float32. The host waits for it only where a parameter has no
        gradient on this rank.

        Args:
            only (set[int], optional): ``id`` of the parameters that step. Defaults to None: all that are trained.
        """
        # Asked anew each time: hooks and models freeze and unfreeze during a run.
        params = [param for param in self.params if (param.requires_grad if only is None else id(param) in only)]
        if not params:
            return
        grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
        used = torch.tensor([float(param.grad is not None) for param in params], device=grads[0].device)
        packed = torch.cat([*(grad.detach().flatten().to(torch.float32) for grad in grads), used])
        dist.all_reduce(packed)
        packed /= dist.get_world_size()
        *means, used = packed.split([*(param.numel() for param in params), len(params)])
        is_used = [param.grad is not None for param in params]
        if not all(is_used):
            is_used = [share > 0 for share in used.tolist()]
        for param, mean, keeps in zip(params, means, is_used, strict=True):
            param.grad = mean.view(param.shape).to(param.dtype).clone() if keeps else None
