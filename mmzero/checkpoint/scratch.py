"""Tensors in a file beside a checkpoint that is being written, mapped into memory: a whole model in the page cache."""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmzero.errors import CheckpointError

SMALLEST_BYTES = 2**16
"""A mapping takes whole pages, and a process has a limited number of them."""


class Scratch:
    """Holds tensors as memory of a file's.

    Args:
        path (str): The file.
    """

    def __init__(self, path: str) -> None:
        self._file: Any = open(path, 'w+b')  # noqa: SIM115
        self._size = 0
        self.path = path

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Make a tensor to be filled.

        Args:
            shape (Sequence[int]): Its shape.
            dtype (torch.dtype): Its dtype.

        Returns:
            Tensor: Its memory is the file's: as shared memory it counts for no process alone.

        Raises:
            OSError: If the disk is full.
        """
        size = math.prod(shape) * dtype.itemsize
        if size < SMALLEST_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        start = self._size
        # Written through memory, a disk that is full would end the process by SIGBUS.
        os.posix_fallocate(self._file.fileno(), start, size)
        self._size += size
        mapped = np.memmap(self.path, np.uint8, 'r+', start, (size,))
        return torch.from_numpy(mapped).view(dtype).view(tuple(shape))

    def put(self, tensor: Tensor) -> Tensor:
        """Copy a tensor.

        Args:
            tensor (Tensor): On the CPU.

        Returns:
            Tensor: As :meth:`empty` makes it.
        """
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor.detach())

    def close(self) -> None:
        """Remove the file; what was given back stays valid."""
        self._file.close()
        os.remove(self.path)


@contextmanager
def scratch_beside(path: str | os.PathLike) -> Iterator[Scratch]:
    """Make a scratch file for as long as a checkpoint is written.

    Args:
        path (str or PathLike): The checkpoint.

    Yields:
        Scratch: The file.

    Raises:
        CheckpointError: If nothing can be written there.
    """
    folder, name = os.path.split(os.path.abspath(path))
    try:
        os.makedirs(folder, exist_ok=True)
        scratch = Scratch(os.path.join(folder, f'.{name}.scratch'))
    except OSError as error:
        raise CheckpointError(f'{path} cannot be written ({error.strerror}); name another target') from error
    try:
        yield scratch
    finally:
        scratch.close()
