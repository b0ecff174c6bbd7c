"""Activation checkpointing on module instances: apply, undo, and count what matched; and compiling them."""

from mmzero.patches.apply import Applied, apply_patches
from mmzero.patches.budget import Budget
from mmzero.patches.checkpoint import Region, checkpoint_module
from mmzero.patches.compiled import CompiledForward, compile_alike, compile_error
from mmzero.patches.huggingface import HuggingFaceLayer
from mmzero.patches.kept import KeptBytes
from mmzero.patches.num_cp import NumCp
from mmzero.patches.offload import OffloadToHost
from mmzero.patches.patch import CheckpointPatch, Undo, set_attribute
from mmzero.patches.switch import OwnBlock, OwnParts
from mmzero.patches.timm import FeatureNet
from mmzero.patches.with_cp import WithCp

__all__ = [
    'Applied',
    'Budget',
    'CheckpointPatch',
    'CompiledForward',
    'FeatureNet',
    'HuggingFaceLayer',
    'KeptBytes',
    'NumCp',
    'OffloadToHost',
    'OwnBlock',
    'OwnParts',
    'Region',
    'Undo',
    'WithCp',
    'apply_patches',
    'checkpoint_module',
    'compile_alike',
    'compile_error',
    'set_attribute',
]
