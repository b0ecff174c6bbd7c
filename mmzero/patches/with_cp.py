"""Blocks that checkpoint themselves by ``with_cp=True``: those of mmcv, mmdet, mmseg and mmpretrain."""

from collections.abc import Sequence

from torch import nn

from mmzero.patches.patch import CheckpointPatch, Undo, set_attribute
from mmzero.registry import CHECKPOINT_PATCHES

# Classes whose forward calls torch.utils.checkpoint in its re-entrant form when ``with_cp`` is set. That form
# breaks sharding (FSDP1: "mat2 must be a matrix, got 1-D tensor"; DDP: "marked ready twice").
WITH_CP_CLASSES = ('SwinBlock', 'BasicBlock', 'Bottleneck')


@CHECKPOINT_PATCHES.register_module(name=list(WITH_CP_CLASSES))
class WithCp(CheckpointPatch):
    """Replaces a block's own re-entrant checkpointing by the non-re-entrant one, over its whole forward."""

    def asks_for(self, module: nn.Module) -> Sequence[nn.Module]:
        """As the base says: the block, where ``with_cp`` is set."""
        return (module,) if getattr(module, 'with_cp', False) else ()

    def turn_off(self, module: nn.Module) -> Undo:
        """As the base says."""
        return set_attribute(module, 'with_cp', False)
