"""Copies of weights that autocast made and autograd keeps until backward."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class WeightCopies:
    """Finds casts of parameters among the tensors that autograd saves for backward.

    Under autocast every operator on fp32 weights works on 16-bit copies, which autograd saves: as much memory again
    as 16-bit parameters would take, for all of forward, whatever the engine frees.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        """Bytes of all copies of a forward, each counted once."""
        return sum(self._sizes.values())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at what forwards inside save; tensors that activation checkpointing saves for itself do not come by.

        Yields:
            None: Inside, copies are found.
        """
        with saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        whole = tensor if tensor._base is None else tensor._base
        cast = whole.grad_fn
        if cast is not None and cast.name() == 'ToCopyBackward0':
            source = getattr(cast.next_functions[0][0], 'variable', None)
            if isinstance(source, nn.Parameter):
                storage = whole.untyped_storage()
                self._sizes[storage.data_ptr()] = storage.nbytes()
        # A saved output that comes back as itself would keep its own graph alive.
        return tensor.detach()
