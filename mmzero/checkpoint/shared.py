"""Whether all ranks see one file system, told before anything depends on it."""

import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mmzero.checkpoint.safetensors_files import files_of, is_safetensors
from mmzero.checkpoint.sharded import is_sharded, is_whole
from mmzero.engines import from_rank0, on_rank0
from mmzero.errors import CheckpointError

# For which a network file system may be late.
PATIENCE_SECONDS = 3.0
_PAUSE_SECONDS = 0.1


def check_shared(folder: str | os.PathLike) -> None:
    """Check that every rank sees what rank 0 writes in a folder, and may write there itself. Collective.

    Args:
        folder (str or PathLike): Where sharded checkpoints will be; made where it is not there.

    Raises:
        CheckpointError: On every rank, if one does not.
    """
    made = Path(from_rank0(lambda: _make(folder)))
    try:
        _raise_if_any(folder, _late(lambda: _touch(made / str(dist.get_rank()))))
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(made, ignore_errors=True)


def check_writable(folder: str | os.PathLike) -> None:
    """Check that rank 0 may write in a folder. Collective.

    Args:
        folder (str or PathLike): Where full checkpoints will be; made where it is not there.

    Raises:
        CheckpointError: On every rank, if it may not.
    """
    on_rank0(lambda: os.rmdir(_make(folder)))


def check_seen(path: str | os.PathLike) -> None:
    """Check that every rank sees a checkpoint of which each reads its shards. Collective.

    Args:
        path (str or PathLike): The checkpoint, which rank 0 sees.

    Raises:
        CheckpointError: On every rank, if one does not.
    """
    _raise_if_any(path, _late(lambda: None if os.path.exists(path) else 'does not see'))


def each_reads(path: str, wanted: Mapping[str, Any] | None = None) -> bool:
    """Say whether each rank reads its own shards of a checkpoint, rather than rank 0 all of it. Collective.

    Args:
        path (str): The checkpoint.
        wanted (Mapping[str, Any], optional): The state dict of a model that is not sharded yet, and may still make
            something else of the weights. Defaults to None: it is sharded.

    Returns:
        bool: True for a sharded checkpoint, and for ``.safetensors`` of which every rank sees all files and, before
        sharding, each weight has its name and shape.

    Raises:
        CheckpointError: On every rank, if ``.safetensors`` cannot be read.
    """
    sharded, fits = from_rank0(
        lambda: (is_sharded(path), is_safetensors(path) and (wanted is None or is_whole(path, wanted)))
    )
    if sharded or not fits:
        return sharded
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, _sees_all_of(path))
    return all(everyones)


def _sees_all_of(path: str) -> bool:
    """Whether this rank sees each file of ``.safetensors``; another node may hold a part of them."""
    try:
        return all(os.path.isfile(file) for file in files_of(path))
    except CheckpointError:
        return False


def made_in(folder: str | os.PathLike) -> Path:
    """Make a folder of a new name in another one. On one rank.

    Args:
        folder (str or PathLike): The other one, made where it is not there.

    Returns:
        Path: What was made; empty.

    Raises:
        OSError: If it cannot be.
    """
    made = Path(folder, f'.mmzero-{uuid.uuid4().hex}')
    made.mkdir(parents=True)
    return made


def _make(folder: str | os.PathLike) -> str:
    try:
        return str(made_in(folder))
    except OSError as error:
        raise CheckpointError(
            f'checkpoints cannot be saved to {folder}: {error}; set work_dir, or out_dir of default_hooks.checkpoint, '
            'to a folder that can be written to'
        ) from error


def _touch(path: Path) -> str | None:
    """Write a file; says what this rank cannot do."""
    try:
        path.touch()
    except FileNotFoundError:
        return 'does not see'
    except OSError as error:
        return f'cannot write ({error.strerror}) beside'
    return None


def _late(fault: Callable[[], str | None]) -> str | None:
    """Say what stays wrong."""
    end = time.monotonic() + PATIENCE_SECONDS
    while (found := fault()) is not None and time.monotonic() < end:
        time.sleep(_PAUSE_SECONDS)
    return found


def _raise_if_any(folder: str | os.PathLike, own: str | None) -> None:
    """Let all ranks raise the same, if one has a fault. Collective."""
    everyones: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (socket.gethostname(), own))
    wrong = [(rank, host, fault) for rank, (host, fault) in enumerate(everyones) if fault is not None]
    if not wrong:
        return
    rank, host, fault = wrong[0]
    more = f' (and {len(wrong) - 1} more ranks)' if len(wrong) > 1 else ''
    raise CheckpointError(
        f'{folder}: rank {rank} on {host}{more} {fault} what rank 0 on {everyones[0][0]} has there. Of sharded '
        'checkpoints each rank writes and reads its part, in a folder that all share and may write to; nodes may have '
        'disks of their own there. Put it on one that is shared (for saves: work_dir, or out_dir of '
        "default_hooks.checkpoint), or use checkpoint=dict(format='full'), which rank 0 alone writes and reads"
    )
