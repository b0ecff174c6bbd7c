"""Putting what is kept for backward into host memory."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

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
    CPU nothing is copied.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._order: list[weakref.ref[_Stored]] = []

    def saving(self) -> saved_tensors_hooks:
        """The context of a forward whose saved tensors are moved.

        Returns:
            saved_tensors_hooks: The context.
        """
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.device.type != 'cuda' or tensor.nbytes < SMALLEST or is_parameter(tensor):
            # Not the tensor itself: an output that its own graph holds would never be freed without a backward.
            return tensor if tensor.is_leaf else tensor.detach()
        if tensor.device not in self._streams:
            self._streams[tensor.device] = torch.cuda.Stream(tensor.device)
        stored = _Stored(tensor.detach(), self._streams[tensor.device])
        self._order.append(weakref.ref(stored))
        return len(self._order) - 1, stored

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        index, stored = packed
        tensor = stored.take()
        for reference in self._order[max(index - AHEAD, 0) : index]:
            ahead = reference()
            if ahead is not None:
                ahead.fetch()
        # Backward comes to what was saved later first; it has no use for it again.
        del self._order[index:]
        return tensor


def is_parameter(tensor: Tensor) -> bool:
    """Say whether a saved tensor is a parameter, or a view of one as matrix products save it.

    Args:
        tensor (Tensor): The tensor.

    Returns:
        bool: Whether it is.
    """
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)
