"""Which engine serves a config."""

import os

import torch

from mmzero.config import ZeroConfig
from mmzero.engines.base import Engine
from mmzero.engines.ddp import DDPEngine
from mmzero.engines.deepspeed import DeepSpeedEngine
from mmzero.engines.fsdp2 import FSDP2Engine
from mmzero.engines.param_grads import ParamGradEngine
from mmzero.engines.separate import SeparateEngine
from mmzero.errors import ConfigError

ENGINES: dict[str, type[Engine]] = {'fsdp2': FSDP2Engine, 'deepspeed': DeepSpeedEngine}
"""By the name that ``model_wrapper_cfg.engine`` has for stages 1 to 3."""


def build_engine(config: ZeroConfig) -> Engine:
    """Choose the engine: DDP for stage 0, else the one that the config names.

    Args:
        config (ZeroConfig): The checked config.

    Returns:
        Engine: The engine, on this rank's device.

    Raises:
        ConfigError: If the engine's package is missing, or it does not do what the config asks for.
    """
    engine = engine_class(config)
    if not config.separate:
        return engine(config, this_device())
    if not issubclass(engine, ParamGradEngine):
        raise ConfigError([f'model_wrapper_cfg.separate: engine={config.engine!r} shards whole models; remove one'])
    return SeparateEngine(config, this_device(), engine)


def engine_class(config: ZeroConfig) -> type[Engine]:
    """Which class of engine a config means.

    Args:
        config (ZeroConfig): The config.

    Returns:
        type[Engine]: DDP's at stage 0, else that of ``engine``.
    """
    return DDPEngine if config.stage == 0 else ENGINES[config.engine]


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
