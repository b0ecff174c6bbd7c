"""Parameters that FSDP2 cannot shard, kept whole on every rank, their gradients averaged by one all-reduce."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn


class ReplicatedParameters:
    """0-dim parameters, such as mmcv's Scale or a logit scale.

    Args:
        params (Sequence[nn.Parameter]): The parameters, the same on every rank.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = [param for param in params if param.requires_grad]

    def reduce_gradients(self) -> None:
        """Average the gradients over all ranks; one used on no rank keeps none. Collective, once per step."""
        if not self.params:
            return
        device = self.params[0].device
        values = torch.stack(
            [param.grad if param.grad is not None else torch.zeros_like(param) for param in self.params]
        )
        used = torch.tensor([float(param.grad is not None) for param in self.params], device=device)
        packed = torch.cat([values.detach().to(torch.float32), used])
        dist.all_reduce(packed)
        means, used = (packed / dist.get_world_size()).split(len(self.params))
        for param, mean, share in zip(self.params, means, used, strict=True):
            param.grad = mean.to(param.dtype).clone() if share > 0 else None
