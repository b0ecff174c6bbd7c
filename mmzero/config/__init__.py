"""The fields of ``model_wrapper_cfg``: frozen dataclasses, and the reader that lists every fault at once."""

from mmzero.config.overrides import OverrideConfig
from mmzero.config.reader import Faults, Reader, read_fields
from mmzero.config.zero import MeshConfig, PrecisionConfig, ZeroConfig, read_zero_config

__all__ = [
    'Faults',
    'MeshConfig',
    'OverrideConfig',
    'PrecisionConfig',
    'Reader',
    'ZeroConfig',
    'read_fields',
    'read_zero_config',
]
