"""Saving: every rank writes its shards, rank 0 what is no tensor, and then it is a checkpoint."""

import io
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter

from mmzero.checkpoint.plain import plain
from mmzero.checkpoint.sharded.folder import begin, commit, part_of, sums_of
from mmzero.checkpoint.sharded.reader import METADATA
from mmzero.engines import on_rank0, together
from mmzero.errors import CheckpointError

REST_FILE = 'rest.pth'


def save_sharded(tensors: dict[str, Tensor], rest: dict[str, Any], folder: str | os.PathLike) -> None:
    """Write a checkpoint. Collective; all ranks see one file system.

    A rank writes its own shards; of what all ranks hold whole, one of them writes it. Communication: what DCP
    exchanges to plan, and one exchange of checksums; no tensor.

    Args:
        tensors (dict[str, Tensor]): Shards (one of :data:`mmzero.engines.SHARDS`), the same names on every rank, and
            whole tensors by name, on each rank that may write them.
        rest (dict): What else there is; rank 0's is written.
        folder (str or PathLike): Where. A checkpoint of that name is replaced once this one is complete.

    Raises:
        CheckpointError: On every rank, if a rank could not write. What was there before is there still.
    """
    target = Path(folder)
    begin_sharded(target)
    write_sharded(tensors, plain(rest), target)


def begin_sharded(target: Path) -> None:
    """Make the folder into which ranks write. Collective.

    Args:
        target (Path): Where the checkpoint will be.

    Raises:
        CheckpointError: On every rank, if it cannot be made.
    """
    on_rank0(lambda: _told(target, lambda: begin(target)))


def write_sharded(
    tensors: dict[str, Tensor], rest: dict[str, Any], target: Path, group: dist.ProcessGroup | None = None
) -> None:
    """Write into the folder that was made, and turn it into a checkpoint. Collective.

    Args:
        tensors (dict[str, Tensor]): As :func:`save_sharded`.
        rest (dict): Plain values.
        target (Path): Where the checkpoint will be.
        group (ProcessGroup, optional): Over which ranks agree. Defaults to None: the one that trains.

    Raises:
        CheckpointError: On every rank, if a rank could not write.
    """
    try:
        _write(tensors, rest, target, group)
    except CheckpointError:
        # A disk that is full would stay so.
        if dist.get_rank() == 0:
            shutil.rmtree(part_of(target), ignore_errors=True)
        raise


def _write(tensors: dict[str, Tensor], rest: dict[str, Any], target: Path, group: dist.ProcessGroup | None) -> None:
    part = part_of(target)
    try:
        dcp.save(tensors, storage_writer=FileSystemWriter(part, sync_files=True), process_group=group)
    except dcp.api.CheckpointException as error:
        raise CheckpointError(f'could not save {target}: {_first(error)}') from error
    own = together(lambda: _told(target, lambda: sums_of(part, _own_files(part))), group)
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own, group)
    on_rank0(lambda: _told(target, lambda: _finish(target, everyones, rest)), group)


def _told(target: Path, work: Any) -> Any:
    try:
        return work()
    except OSError as error:
        raise CheckpointError(f'could not save {target}: {error}') from error


def _own_files(part: Path) -> list[str]:
    """Those that this rank has written."""
    return sorted(path.name for path in part.glob(f'__{dist.get_rank()}_*.distcp'))


def _finish(target: Path, everyones: list[dict], rest: dict[str, Any]) -> None:
    part = part_of(target)
    for rank, own in enumerate(everyones):
        unseen = [name for name in own if not (part / name).is_file()]
        if unseen:
            raise CheckpointError(
                f'could not save {target}: rank 0 does not see {unseen[0]}, which rank {rank} has written: each node '
                'has a disk of its own there; save to a file system that all ranks share (work_dir, or out_dir of '
                "default_hooks.checkpoint), or use checkpoint=dict(format='full')"
            )
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    # Not by torch, which says "unexpected pos" of a full disk.
    with open(part / REST_FILE, 'wb') as file:
        file.write(buffer.getbuffer())
        file.flush()
        os.fsync(file.fileno())
    sums = {name: value for own in everyones for name, value in own.items()}
    commit(target, {**sums, **sums_of(part, [REST_FILE, METADATA])}, sorted(rest))


def _first(error: dcp.api.CheckpointException) -> str:
    rank, (reason, _) = min(error.failures.items())
    return f'rank {rank}: {type(reason).__name__}: {reason}'
