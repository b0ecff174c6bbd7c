"""Tensors in a file beside a checkpoint that is being written, mapped into memory: a whole model in the page cache."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Scratch:
    """Takes tensors one by one, and gives each back as memory of the file's.

    Args:
        path (str): The file.
    """

    def __init__(self, path: str) -> None:
        self._file: Any = open(path, 'w+b')  # noqa: SIM115
        self.path = path

    def put(self, tensor: Tensor) -> Tensor:
        """Write a tensor.

        Args:
            tensor (Tensor): On the CPU.

        Returns:
            Tensor: Its like, whose memory is the file's: as shared memory it counts for no process alone.
        """
        if not tensor.numel():
            return tensor.clone()
        self._file.seek(0, os.SEEK_END)
        offset = self._file.tell()
        self._file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._file.flush()
        mapped = np.memmap(self.path, np.uint8, 'r+', offset, (tensor.numel() * tensor.element_size(),))
        return torch.from_numpy(mapped).view(tensor.dtype).view(tensor.shape)

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
    """
    folder, name = os.path.split(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    scratch = Scratch(os.path.join(folder, f'.{name}.scratch'))
    try:
        yield scratch
    finally:
        scratch.close()
