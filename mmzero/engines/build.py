"""Which engine serves a config."""

import os

import torch

from mmzero.config import ZeroConfig
from mmzero.engines.base import Engine
from mmzero.engines.ddp import DDPEngine
from mmzero.engines.fsdp2 import FSDP2Engine


def build_engine(config: ZeroConfig) -> Engine:
    """Choose the engine: DDP for stage 0, else the one that the config names.

    Args:
        config (ZeroConfig): The checked config.

    Returns:
        Engine: The engine, on this rank's device.
    """
    cls = DDPEngine if config.stage == 0 else FSDP2Engine
    return cls(config, this_device())


def this_device() -> torch.device:
    """Where this rank computes: its GPU, or the CPU where there is none.

    Returns:
        torch.device: The device.
    """
    if not torch.cuda.is_available():
        return torch.device('cpu')
    if 'LOCAL_RANK' in os.environ:
        return torch.device('cuda', int(os.environ['LOCAL_RANK']))
    # Asked only here: it starts CUDA on a GPU, which the check of a config must not.
    return torch.device('cuda', torch.cuda.current_device())
