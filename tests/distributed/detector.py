"""A backbone and a head, whose weights come from files in every way that MMEngine has."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from mmengine.model import BaseModel, BaseModule
from mmengine.runner.checkpoint import CheckpointLoader
from torch import nn

from mmzero import ZeroRunner
from tests.distributed.training import full
from tests.vectors import vector_runner


class Backbone(BaseModule):
    """A part of a model that may have weights of its own to start from."""

    def __init__(self, init_cfg: Any = None) -> None:
        super().__init__(init_cfg)
        self.conv = nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x))


class LoadsByItself(Backbone):
    """Reads its weights as mmdet's Swin does, by torch's load_state_dict."""

    def init_weights(self) -> None:
        loaded = CheckpointLoader.load_checkpoint(self.init_cfg['checkpoint'], map_location='cpu')
        self.load_state_dict(loaded['state_dict'] if 'state_dict' in loaded else loaded, False)


class Detector(BaseModel):
    """A backbone and a head."""

    def __init__(
        self, classes: int = 7, init_cfg: Any = None, backbone_cfg: Any = None, backbone: type[Backbone] = Backbone
    ) -> None:
        super().__init__(init_cfg=init_cfg)
        self.backbone = backbone(backbone_cfg)
        self.head = nn.Linear(12, classes)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None, mode: str = 'tensor') -> Any:
        logits = self.head(self.backbone(inputs))
        if mode == 'loss':
            return dict(loss=nn.functional.cross_entropy(logits, labels))
        return list(logits)


def pretrained(path: str, **more: Any) -> dict:
    """An ``init_cfg`` that reads a file."""
    return dict(type='Pretrained', checkpoint=path, **more)


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a model from a seed."""
    torch.manual_seed(seed)
    return build()


def on_file(path: str, content: Any) -> str:
    """Write a file on rank 0."""
    if dist.get_rank() == 0:
        torch.save(content, path)
    dist.barrier()
    return path


def detector_runner(folder: str, stage: int, model: dict | None = None, **changes: Any) -> ZeroRunner:
    """Build from a config: real on rank 0, with parameters on meta elsewhere; the ranks' seeds differ."""
    changes = dict(launcher='pytorch', randomness=dict(seed=0, diff_rank_seed=True)) | changes
    model = dict(type=Detector) | (model or {})
    return vector_runner(f'{folder}/work', model, stage, dict(find_unused_parameters=True), **changes)


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters, gathered, and all buffers, also those in no state dict. Collective."""
    found = {name: full(param) for name, param in model.named_parameters(remove_duplicate=False)}
    return found | {name: buffer.clone() for name, buffer in model.named_buffers(remove_duplicate=False)}


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """What the state dict of the unsharded model would hold. Collective."""
    held = model.state_dict()
    return {name: value for name, value in tensors_of(model).items() if name in held}
