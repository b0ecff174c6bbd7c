"""Scaling of the loss in float16, over gradients of any kind."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from mmzero.config import LossScale
from mmzero.errors import ConfigError


class LossScaler(torch.amp.GradScaler):
    """torch's GradScaler, whose ranks decide together whether a step is skipped.

    torch's own takes shards and whole tensors in one call, which its kernel refuses, and asks the ranks once per
    kind of sharding. Here each rank looks at what it holds, and one all-reduce of a scalar joins what they found.

    Args:
        device (torch.device): Where the loss is computed.
        scale (LossScale): What the config asks for.
        sharded (bool): Whether ranks hold different gradients. Defaults to True.
    """

    def __init__(self, device: torch.device, scale: LossScale, sharded: bool = True) -> None:
        self.static = scale.static
        options = scale.options if scale.static is None else dict(init_scale=scale.static)
        super().__init__(device.type, **options)
        self.sharded = sharded
        self._overflow = torch.zeros((), device=device)

    def check(self, optimizer: Optimizer) -> None:
        """Refuse parameters whose gradients would be in float16.

        Args:
            optimizer (Optimizer): The optimizer.

        Raises:
            ConfigError: If it trains one: a gradient that was rounded to float16 cannot be scaled back.
        """
        params = [param for group in optimizer.param_groups for param in group['params'] if param.requires_grad]
        half = sum(param.dtype == torch.float16 for param in params)
        if half:
            raise ConfigError(
                [
                    f'model: {half} of {len(params)} trained parameters are stored in float16, and so would be their '
                    "gradients, which cannot be scaled back; keep the model in float32, optim_wrapper.dtype='float16' "
                    'casts what it computes'
                ]
            )

    def has_overflowed(self) -> bool:
        """Whether a gradient of any rank was not finite when the gradients were scaled back. Waits for the device.

        torch's own ``step`` leaves the decision to fused optimizers; a fused SGD whose first step is skipped goes on
        with momentum buffers that nothing has written.

        Returns:
            bool: Whether the step is to be skipped.
        """
        return bool(self._overflow.item())

    @override
    def update(self, new_scale: float | Tensor | None = None) -> None:
        super().update(self.static if new_scale is None else new_scale)

    # What torch's ShardedGradScaler, made for FSDP1, overrides as well.
    @override
    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        params = (param for group in optimizer.param_groups for param in group['params'])
        local = [_local(param) for param in params if param.grad is not None]
        view = SimpleNamespace(param_groups=[dict(params=local)])
        found = super()._unscale_grads_(view, inv_scale, found_inf, allow_fp16)  # type: ignore[arg-type]
        # A step in which no parameter was used has found nothing, and is no fault.
        total = torch.stack([found_inf, *(value.to(found_inf.device) for value in found.values())]).amax()
        if self.sharded:
            dist.all_reduce(total, op=dist.ReduceOp.MAX)
        self._overflow = total
        return {total.device: total}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # A fixed scale is the config's.
        if self.static is None:
            super().load_state_dict(state_dict)


def _local(param: Tensor) -> Tensor:
    """This rank's part of a parameter, with its part of the gradient."""
    if not isinstance(param, DTensor):
        return param
    shard: Any = param.detach()
    grad: Any = param.grad
    local: Tensor = shard.to_local()
    local.grad = grad.to_local()
    return local
