"""Activation checkpointing on module instances: apply, undo, and count what matched."""

from mmzero.patches.apply import Applied, apply_patches
from mmzero.patches.checkpoint import checkpoint_module
from mmzero.patches.with_cp import with_cp_block

__all__ = ['Applied', 'apply_patches', 'checkpoint_module', 'with_cp_block']
