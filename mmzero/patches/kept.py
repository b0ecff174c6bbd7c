"""Counting the bytes that autograd keeps from forward to backward."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from mmzero._compat import saved_tensors_hooks_in_force
from mmzero.patches.offload import has_storage, is_parameter


class KeptBytes:
    """Bytes that autograd keeps on the devices, each storage once, without parameters.

    Stands on ``torch.autograd.graph.saved_tensors_hooks``. What is saved under hooks of its own inside, as in a
    recomputed region, is not seen, since it does not stay.

    Args:
        holds (bool): Whether to hold what is added while it is counted, where it would be freed and leave its address
            to others. Defaults to False.

    Attributes:
        sizes (dict[int, int]): Bytes by address of the storage.
    """

    def __init__(self, holds: bool = False) -> None:
        self.sizes: dict[int, int] = {}
        self._held: list[Tensor] | None = [] if holds else None

    @property
    def total(self) -> int:
        """Bytes of all storages together."""
        return sum(self.sizes.values())

    def add(self, tensor: Tensor) -> None:
        """Count a tensor, unless it is a parameter or has no memory of its own.

        Args:
            tensor (Tensor): What is kept.
        """
        if is_parameter(tensor) or tensor.is_meta or not has_storage(tensor):
            return
        storage = tensor.untyped_storage()
        self.sizes[storage.data_ptr()] = storage.nbytes()
        if self._held is not None:
            self._held.append(tensor.detach())

    def add_all(self, tree: Any) -> None:
        """Count the tensors of what an operator returns.

        Args:
            tree (Any): A tensor, or a container of such.
        """
        for item in tree_leaves(tree):
            if isinstance(item, Tensor):
                self.add(item)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """The context of a forward; saved tensors are counted, and then kept as they would be.

        Yields:
            None: The forward runs inside; at its end, what is held is given up.
        """
        pack, unpack = saved_tensors_hooks_in_force()

        def count(tensor: Tensor) -> Any:
            self.add(tensor)
            return pack(tensor)

        try:
            with saved_tensors_hooks(count, unpack):
                yield
        finally:
            # Autograd keeps the hooks, and with them this, for as long as what they have packed.
            if self._held is not None:
                self._held.clear()
