"""Putting what is kept for backward into host memory."""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mmzero._compat import check_version, saved_tensors_hooks_in_force, version_of

SMALLEST = 2**16
"""Bytes below which a tensor stays on the GPU: the copy would cost more than it frees."""

AHEAD = 2
"""Tensors that are fetched before backward asks for them."""


class _Stored:
    """A tensor in host memory.

    Args:
        tensor (Tensor): On a GPU.
        stream (torch.cuda.Stream): What copies it.
    """

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        self.device = tensor.device
        self.stream = stream
        self.host = torch.empty_like(tensor, device='cpu', pin_memory=True, requires_grad=False)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host.copy_(tensor, non_blocking=True)
        # The allocator gives the memory away only once it is copied.
        tensor.record_stream(stream)
        self.fetched: Tensor | None = None

    def fetch(self) -> None:
        """Start to copy it back."""
        if self.fetched is None:
            with torch.cuda.stream(self.stream):
                self.fetched = self.host.to(self.device, non_blocking=True)

    def take(self) -> Tensor:
        """Get it on its GPU.

        Returns:
            Tensor: What was stored.
        """
        self.fetch()
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        tensor, self.fetched = self.fetched, None
        tensor.record_stream(current)  # type: ignore[union-attr]
        return tensor  # type: ignore[return-value]


class OffloadToHost:
    """Moves tensors that autograd saves to pinned host memory, and back for backward.

    torch's ``save_on_cpu`` copies on the stream that computes; here each device has a stream for copies, and backward
    fetches ahead in the reverse order of forward. Parameters stay where they are: their memory is the engine's. On a
    CPU, which is the host, nothing is copied.

    Attributes:
        moved (int): Bytes that were moved so far, or on a CPU would have been.
    """

    def __init__(self) -> None:
        self.moved = 0
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._order: list[weakref.ref[_Stored]] = []

    def saving(self) -> saved_tensors_hooks:
        """The context of a forward whose saved tensors are moved.

        Returns:
            saved_tensors_hooks: The context; what is not moved is kept as it would be without it.
        """
        pack, unpack = saved_tensors_hooks_in_force()

        def pack_or_move(tensor: Tensor) -> Any:
            if bytes_of(tensor) < SMALLEST or is_parameter(tensor):
                return pack(tensor)
            self.moved += bytes_of(tensor)
            return self._move(tensor.detach())

        return saved_tensors_hooks(
            pack_or_move, lambda packed: self._fetch(packed) if isinstance(packed, _Moved) else unpack(packed)
        )

    def _move(self, tensor: Tensor) -> '_Moved':
        if not tensor.is_cuda:
            return _Moved(0, tensor, tensor, tensor._version)
        if tensor.device not in self._streams:
            self._streams[tensor.device] = torch.cuda.Stream(tensor.device)
        stored = _Stored(tensor, self._streams[tensor.device])
        return _Moved(self._place(stored), stored, version_of(tensor), tensor._version)

    def _place(self, stored: _Stored) -> int:
        # What no backward has come to is gone by now.
        while self._order and self._order[-1]() is None:
            self._order.pop()
        self._order.append(weakref.ref(stored))
        return len(self._order) - 1

    def _fetch(self, moved: '_Moved') -> Tensor:
        # The copy may have come too late.
        check_version(moved.counter, moved.version)
        if isinstance(moved.tensor, Tensor):
            return moved.tensor
        tensor = moved.tensor.take()
        for reference in self._order[max(moved.place - AHEAD, 0) : moved.place]:
            ahead = reference()
            if ahead is not None:
                ahead.fetch()
        # Backward comes first to what was saved last, and has no use for it again.
        del self._order[moved.place :]
        return tensor


class _Moved(NamedTuple):
    """What autograd holds in the place of a tensor: itself on a CPU, else where it is; and its version."""

    place: int
    tensor: Tensor | _Stored
    counter: Tensor
    version: int


def has_storage(tensor: Tensor) -> bool:
    """Say whether a tensor has memory that can be counted and copied.

    Args:
        tensor (Tensor): The tensor.

    Returns:
        bool: Whether it is neither sparse nor nested.
    """
    return tensor.layout is torch.strided and not tensor.is_nested


def bytes_of(tensor: Tensor) -> int:
    """Say how large a tensor is.

    Args:
        tensor (Tensor): The tensor.

    Returns:
        int: Bytes; none for what has no storage, which is left where it is and not counted.
    """
    return tensor.nbytes if has_storage(tensor) else 0


def is_parameter(tensor: Tensor) -> bool:
    """Say whether a saved tensor is a parameter, or a view of one as matrix products save it.

    Args:
        tensor (Tensor): The tensor.

    Returns:
        bool: Whether it is.
    """
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)
