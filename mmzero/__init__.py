"""mmzero trains OpenMMLab models with ZeRO by changing a config file, never the model."""

# ruff: noqa: E402
from mmzero.integrations.mmcv import install_stand_in

# Before anything imports mmcv.ops, which fails where mmcv's compiled part is missing.
install_stand_in()

from mmzero.integrations.huggingface import AdapterCheckpointHook, HuggingFaceCausalLM, save_adapters
from mmzero.integrations.mmdet.num_cp import install_num_cp
from mmzero.registry import CHECKPOINT_PATCHES, WRAP_POLICIES
from mmzero.runner import ZeroRunner
from mmzero.version import __version__
from mmzero.wrappers import ZeroModelWrapper, ZeroOptimWrapper

# Before a model with num_cp is built, which fails where fairscale is missing.
install_num_cp()

__all__ = [
    'AdapterCheckpointHook',
    'CHECKPOINT_PATCHES',
    'WRAP_POLICIES',
    'HuggingFaceCausalLM',
    'ZeroModelWrapper',
    'ZeroOptimWrapper',
    'ZeroRunner',
    '__version__',
    'save_adapters',
]
