"""The fields of ``model_wrapper_cfg``: frozen dataclasses, and the reader that lists every fault at once."""

from mmzero.config.checkpoint import CheckpointConfig, read_checkpoint_config
from mmzero.config.checkpointing import CheckpointingConfig
from mmzero.config.compile import CompileConfig
from mmzero.config.engine_options import engine_options, optim_fields_of, section, without_auto
from mmzero.config.loss_scale import LossScale, read_loss_scale
from mmzero.config.overrides import OverrideConfig
from mmzero.config.reader import Faults, Reader, read_fields
from mmzero.config.zero import MeshConfig, OffloadConfig, PrecisionConfig, ZeroConfig, read_zero_config

__all__ = [
    'CheckpointConfig',
    'CheckpointingConfig',
    'CompileConfig',
    'Faults',
    'LossScale',
    'MeshConfig',
    'OffloadConfig',
    'OverrideConfig',
    'PrecisionConfig',
    'Reader',
    'ZeroConfig',
    'engine_options',
    'optim_fields_of',
    'read_checkpoint_config',
    'read_fields',
    'read_loss_scale',
    'read_zero_config',
    'section',
    'without_auto',
]
