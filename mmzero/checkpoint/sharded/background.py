"""Saving beside training: shards are copied, and a thread writes them while the next steps run.

[Note: collectives of the background]
A save exchanges plans and checksums. It does so on a gloo group of its own: on the group that trains, its messages
would mix with those of the steps. Ranks start saves in the same order, and one is over before the next one starts.
"""

import copy
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from mmengine.logging import print_log
from torch import Tensor
from torch.distributed.tensor import DTensor

from mmzero._compat import dtensor_as_it_is, local_tensor
from mmzero.checkpoint.plain import plain
from mmzero.checkpoint.sharded.save import begin_sharded, write_sharded
from mmzero.engines import FlatShard
from mmzero.errors import CheckpointError


class BackgroundSave:
    """Writes one checkpoint at a time."""

    def __init__(self) -> None:
        self._group: Any = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._then: list[Callable[[], None]] = []
        self._target: Path | None = None

    def start(self, tensors: dict[str, Tensor], rest: dict[str, Any], folder: str | os.PathLike) -> None:
        """Copy what is to be saved, and begin to write it. Collective; waits for the save before.

        Memory: a copy of this rank's shards on the host, until they are written.

        Args:
            tensors (dict[str, Tensor]): As :func:`mmzero.checkpoint.sharded.save_sharded`.
            rest (dict): Likewise.
            folder (str or PathLike): Likewise.

        Raises:
            CheckpointError: On every rank, if the folder cannot be made.
        """
        self.wait()
        if self._group is None:
            self._group = dist.new_group(backend='gloo')
        self._target = target = Path(folder)
        begin_sharded(target)
        staged = {name: _copied(tensor) for name, tensor in tensors.items()}
        kept = copy.deepcopy(plain(rest))
        # Not waited for where the process ends in an error: ranks may have parted.
        self._thread = threading.Thread(target=self._write, args=(staged, kept, target), daemon=True)
        self._thread.start()

    def _write(self, tensors: dict[str, Tensor], rest: dict[str, Any], target: Path) -> None:
        try:
            write_sharded(tensors, rest, target, self._group)
        except Exception as error:
            self._error = error

    def once_saved(self, work: Callable[[], None]) -> None:
        """Do something once the checkpoint that is being written is complete; at once where none is.

        Args:
            work (Callable[[], None]): What to do, on this thread. Left out where the checkpoint fails.
        """
        if self._thread is None:
            work()
        else:
            self._then.append(work)

    def poll(self) -> None:
        """Tell of a save that has ended, without waiting for one that has not."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the save that is being written, and tell how it ended."""
        if self._thread is None:
            return
        self._thread.join()
        error, then, self._thread, self._error, self._then = self._error, self._then, None, None, []
        if error is not None:
            print_log(f'NOT SAVED: {error}. Training goes on without this checkpoint', 'current', logging.ERROR)
            return
        print_log(f'saved {self._target}', 'current')
        for work in then:
            try:
                work()
            except (OSError, CheckpointError) as error:
                # On rank 0 alone, while the others train.
                print_log(f'{self._target} is saved; what follows it failed: {error}', 'current', logging.ERROR)


def _copied(tensor: Tensor) -> Tensor:
    if isinstance(tensor, FlatShard):
        return tensor.on_host()
    if isinstance(tensor, DTensor):
        return dtensor_as_it_is(_copied(local_tensor(tensor)), tensor)
    return tensor.detach().to('cpu', copy=True)
