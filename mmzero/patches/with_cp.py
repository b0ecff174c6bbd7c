"""Blocks that checkpoint themselves by ``with_cp=True``: Swin and the ResNets of the OpenMMLab packages."""

from collections.abc import Callable

from torch import nn

from mmzero.patches.checkpoint import checkpoint_module
from mmzero.registry import CHECKPOINT_PATCHES

# Classes whose forward calls torch.utils.checkpoint in its re-entrant form when ``with_cp`` is set. That form
# breaks sharding (FSDP1: "mat2 must be a matrix, got 1-D tensor"; DDP: "marked ready twice").
WITH_CP_CLASSES = ('SwinBlock', 'BasicBlock', 'Bottleneck')


@CHECKPOINT_PATCHES.register_module(name=list(WITH_CP_CLASSES))
def with_cp_block(module: nn.Module) -> Callable[[], None] | None:
    """Replace a block's own re-entrant checkpointing by the non-re-entrant one, over its whole forward.

    Args:
        module (nn.Module): A block with an attribute ``with_cp``.

    Returns:
        Callable[[], None] or None: Takes the change back; None where ``with_cp`` is not set and there is
        nothing to do.
    """
    if not getattr(module, 'with_cp', False):
        return None
    undo_checkpoint = checkpoint_module(module)
    module.with_cp = False  # type: ignore[assignment]

    def undo() -> None:
        undo_checkpoint()
        module.with_cp = True  # type: ignore[assignment]

    return undo
