"""What all contestants of a comparison have in common."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from mmengine.model import BaseModel
from torch import Tensor, nn
from torch.optim import Optimizer

Batch = dict[str, Tensor]
Step = Callable[[Sequence[Batch]], list[Tensor]]
"""One optimizer step: micro-batches to their losses."""


@dataclass(frozen=True)
class Setting:
    """One training.

    Args:
        build (Callable[[], BaseModel]): Builds the model, from the seed that is set.
        unit (type[nn.Module]): The class of the units.
        device (torch.device): Where this rank computes.
        stage (int): ZeRO stage, 1 to 3. Defaults to 3.
        accumulation (int): Micro-batches per optimizer step. Defaults to 1.
        bf16 (bool): Units in bfloat16 under autocast. Defaults to False.
        max_norm (float): Gradients are clipped to it. Defaults to 1.
        engine (str): The pair's: 'fsdp2' or 'deepspeed'. Defaults to 'fsdp2'.
    """

    build: Callable[[], BaseModel]
    unit: type[nn.Module]
    device: torch.device
    stage: int = 3
    accumulation: int = 1
    bf16: bool = False
    max_norm: float = 1.0
    engine: str = 'fsdp2'

    def model(self) -> BaseModel:
        """Build the model: the same one each time."""
        torch.manual_seed(0)
        return self.build().train()

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Build AdamW on the parameters of a model, with its default on GPUs.

        torch's default on CPUs, one tensor at a time, would hide all else behind the dispatch of DTensors.
        """
        return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, foreach=True)

    def autocast(self) -> AbstractContextManager:
        """The context of a forward."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self.bf16 else nullcontext()

    @property
    def optim_wrapper(self) -> dict[str, Any]:
        """Arguments of MMEngine's optimizer wrappers."""
        return dict(accumulative_counts=self.accumulation, clip_grad=dict(max_norm=self.max_norm))
