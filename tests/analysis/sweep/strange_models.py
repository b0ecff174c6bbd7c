"""Models for a sweep that do something else under FSDP2, or without objects. Configs import this module."""

import os
import signal
import time
from typing import Any

import torch.distributed as dist
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


@MODELS.register_module()
class Small(BaseModel):
    """The sum of the labels, from the mean of the image."""

    def __init__(self) -> None:
        super().__init__(data_preprocessor=dict(type='mmengine.ImgDataPreprocessor', mean=[127.0] * 3, std=[60.0] * 3))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(3, 3, 3), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(3, 1)

    def forward(self, inputs: Tensor, data_samples: list, mode: str) -> dict:
        self.happen(data_samples)
        for block in self.blocks:
            inputs = block(inputs)
        wanted = inputs.new_tensor([sample.gt_instances.labels.sum() for sample in data_samples])
        return dict(loss=(self.head(inputs.mean((2, 3)))[:, 0] - wanted).square().mean() * self.factor())

    def happen(self, data_samples: list) -> None:
        pass

    def factor(self) -> float:
        return 1.0

    def is_on_rank_1(self) -> bool:
        return dist.is_initialized() and dist.get_rank() == 1


@MODELS.register_module()
class OffBy2e5(Small):
    def factor(self) -> float:
        return 1.00002 if isinstance(self, FSDPModule) else 1.0


@MODELS.register_module()
class Hangs(Small):
    def happen(self, data_samples: list) -> None:
        while isinstance(self, FSDPModule) and self.is_on_rank_1():
            time.sleep(0.1)


@MODELS.register_module()
class Dies(Small):
    def happen(self, data_samples: list) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


@MODELS.register_module()
class NeedsObjects(Small):
    def happen(self, data_samples: list) -> None:
        if not all(len(sample.gt_instances) for sample in data_samples):
            raise ValueError('an image without objects')


@MODELS.register_module()
class NeedsLargeImages(Small):
    def forward(self, inputs: Any, data_samples: list, mode: str) -> dict:
        if inputs.shape[-1] < 64:
            raise ValueError('a small image')
        return super().forward(inputs, data_samples, mode)


@MODELS.register_module()
class Overflows(Small):
    def factor(self) -> float:
        return 1e38
