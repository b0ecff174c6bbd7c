"""A batch that stands in where a rank has none left, in training.

[Note: a batch that stands in]
The step of a rank without a batch has to communicate as the others' do: units, gradients, and what losses reduce in the
model's own code. So the rank runs the model for real, on a copy of its first batch, and its gradients are zeros. Losses
that ranks reduce, and SyncBatchNorm, see that batch; running statistics of other batch norms do not.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_NONE = object()


class StandIn:
    """The copy of a batch, and whether it is in use.

    Args:
        model (nn.Module): The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.batch: Any = _NONE
        self.is_used = False
        self.is_spoilt = False

    @property
    def is_there(self) -> bool:
        """Whether there is a batch."""
        return self.batch is not _NONE

    def keep(self, batch: Any) -> None:
        """Keep a copy of a batch, if there is none yet, or one to be replaced.

        Args:
            batch (Any): A batch of the data loader, which training may change.
        """
        if not self.is_there or self.is_spoilt:
            self.batch = _copied(batch)
            self.is_spoilt = False

    def replace(self) -> None:
        """Let the next batch be kept instead: zero times the gradients of one whose loss is nan is nan."""
        self.is_spoilt = True

    @contextmanager
    def used(self) -> Iterator[Any]:
        """Let steps be those of a batch that does not count.

        Yields:
            Any: A copy of the batch.
        """
        self.is_used = True
        try:
            yield _copied(self.batch)
        finally:
            self.is_used = False

    @contextmanager
    def kept_statistics(self) -> Iterator[None]:
        """Leave running statistics as they are, but for those that ranks compute together.

        Yields:
            None: Inside, the model may be trained.
        """
        norms = [
            module
            for module in self.model.modules()
            if isinstance(module, _NormBase) and not isinstance(module, nn.SyncBatchNorm)
        ]
        kept = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers(recurse=False)]
        try:
            yield
        finally:
            for buffer, value in kept:
                buffer.copy_(value)


def _copied(batch: Any) -> Any:
    try:
        return copy.deepcopy(batch)
    except Exception:
        # A data set may give what only it can make; then the batch itself is used again.
        return batch
