"""Rank 0's buffers on every rank before a forward of training, as under DistributedDataParallel.

[Note: broadcast_buffers]
DDP broadcasts the buffers of rank 0, in place, before each of its own forwards, but for those of micro-batches after
the first of an optimizer step. It is what is called in training: MMEngine's wrappers evaluate the model inside. So in
val ranks differ by what their own last forwards of training added to running statistics, and checkpoints hold rank 0's.
FSDP2 leaves buffers whole and alone, so that the same broadcast before its root's forward gives the same values.
"""

import torch
from torch import nn

from mmzero._compat import broadcast_coalesced
from mmzero.engines.watch import TRAIL


class BufferBroadcast:
    """Decides, as DDP does, before which forwards buffers are broadcast.

    Communication: all buffers once per optimizer step, coalesced by dtype.

    Args:
        model (nn.Module): The model; its buffers may be replaced later.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._is_last = True
        self._is_due = True

    def micro_step(self, is_last: bool) -> None:
        """Be told of a micro-batch.

        Args:
            is_last (bool): Whether the optimizer steps after it.
        """
        self._is_last = is_last

    def before_forward(self) -> None:
        """Give every rank the buffers of rank 0, where it is due. Collective."""
        # A view with a version of its own: an earlier forward may have saved a buffer for its backward.
        buffers = [buffer.data for buffer in self._model.buffers()]
        if self._is_due and buffers:
            TRAIL.come_to('the broadcast of buffers before a forward')
            broadcast_coalesced(buffers)
        self._is_due = self._is_last and torch.is_grad_enabled()
