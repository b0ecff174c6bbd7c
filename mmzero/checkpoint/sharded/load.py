"""Loading: each rank reads of each file what its own shards need, on any number of ranks."""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from mmzero.checkpoint.names import clean_names
from mmzero.checkpoint.safetensors_files import SafetensorsReader, is_safetensors
from mmzero.checkpoint.sharded.folder import FolderState, check_sums, state_of
from mmzero.checkpoint.sharded.reader import METADATA, SafeReader
from mmzero.checkpoint.sharded.save import REST_FILE
from mmzero.engines import on_rank0, together
from mmzero.errors import CheckpointError

SHOWN_FAULTS = 5


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint, which each rank reads for its shard.

    Args:
        folder (Path): The checkpoint.
        name (str): Its name there.
        shape (torch.Size): Of the whole.
        dtype (torch.dtype): As it was saved.
    """

    folder: Path
    name: str
    shape: torch.Size
    dtype: torch.dtype


def load_rest(folder: str | os.PathLike) -> dict[str, Any]:
    """Read what is no tensor of its own: counters, schedulers, groups. On one rank, without communication.

    Args:
        folder (str or PathLike): The checkpoint.

    Returns:
        dict: As it was given to :func:`mmzero.checkpoint.sharded.save_sharded`, made plain.

    Raises:
        CheckpointError: If the folder is no complete checkpoint, or is damaged.
    """
    state = complete(folder)
    check_sums(state, [REST_FILE, METADATA])
    return torch.load(state.path / REST_FILE, map_location='cpu', weights_only=True)


def tensors_in(folder: str | os.PathLike) -> dict[str, SavedTensor]:
    """List the tensors of a checkpoint. On one rank, without communication.

    Args:
        folder (str or PathLike): The checkpoint, or ``.safetensors`` as
            :func:`mmzero.checkpoint.safetensors_files.is_safetensors` takes it.

    Returns:
        dict[str, SavedTensor]: By name.

    Raises:
        CheckpointError: If it cannot be read.
    """
    try:
        metadata = _reader(folder).read_metadata()
    except CheckpointError:
        raise
    except Exception as error:
        what = '' if is_safetensors(folder) else f'{METADATA} '
        raise CheckpointError(f'{folder}: {what}cannot be read: {error}') from error
    known: Mapping[str, Any] = metadata.state_dict_metadata
    path = Path(folder)
    return {name: SavedTensor(path, name, item.size, item.properties.dtype) for name, item in known.items()}


def contents_of(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, SavedTensor]]:
    """List what each rank can read its shards of. On one rank, without communication.

    Args:
        path (str or PathLike): As :func:`tensors_in` takes it.

    Returns:
        tuple[dict, dict[str, SavedTensor]]: As :func:`load_rest` and :func:`tensors_in` give it, of weights alone where
        there is nothing else.

    Raises:
        CheckpointError: If it cannot be read.
    """
    if is_safetensors(path):
        return dict(state_dict={}), {f'state_dict/{name}': saved for name, saved in tensors_in(path).items()}
    return load_rest(path), tensors_in(path)


def is_whole(path: str | os.PathLike, wanted: Mapping[str, Any]) -> bool:
    """Say whether ``.safetensors`` hold each weight of a model in its shape. On one rank, without communication.

    Otherwise it is the model that makes something of what was saved: it resizes tables, or has other names for weights.

    Args:
        path (str or PathLike): As :func:`mmzero.checkpoint.safetensors_files.is_safetensors` takes it.
        wanted (Mapping[str, Any]): The model's state dict.

    Returns:
        bool: Whether they do.

    Raises:
        CheckpointError: If they cannot be read.
    """
    saved = clean_names(tensors_in(path), wanted)
    shapes = {name: value.shape for name, value in wanted.items() if isinstance(value, Tensor)}
    return all(name in saved and saved[name].shape == shape for name, shape in shapes.items())


def load_saved(pairs: Sequence[tuple[SavedTensor, Tensor]]) -> None:
    """Fill tensors with what was saved. Collective.

    Args:
        pairs (Sequence[tuple[SavedTensor, Tensor]]): What was saved, and the shard or whole tensor that it goes into,
            which is changed in place; the same on every rank, of one checkpoint.

    Raises:
        CheckpointError: As :func:`load_tensors`.
    """
    if pairs:
        load_tensors({saved.name: target for saved, target in pairs}, pairs[0][0].folder)


def read_alone(saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
    """Read whole tensors of one checkpoint. On one rank, without communication.

    Args:
        saved (Mapping[str, SavedTensor]): Where they were saved, by any names.

    Returns:
        dict[str, Tensor]: Tensors on the CPU, by these names.
    """
    whole = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in saved.items()}
    if whole:
        folder = next(iter(saved.values())).folder
        fill_alone({saved[name].name: tensor for name, tensor in whole.items()}, folder)
    return whole


def fill_alone(targets: dict[str, Tensor], folder: str | os.PathLike) -> None:
    """Fill whole tensors from a checkpoint. On one rank, without communication.

    Args:
        targets (dict[str, Tensor]): By their names in the checkpoint; changed in place.
        folder (str or PathLike): The checkpoint, whose files were checked.
    """
    with warnings.catch_warnings():
        # That there are no other ranks is what is meant.
        warnings.filterwarnings('ignore', message='torch.distributed is disabled')
        dcp.load(targets, storage_reader=_reader(folder), no_dist=True)


def check_files(folder: str | os.PathLike) -> None:
    """Hold every file of a checkpoint against its checksum, each on one of the ranks. Collective.

    Args:
        folder (str or PathLike): The checkpoint; ``.safetensors`` have no checksums.

    Raises:
        CheckpointError: On every rank, if it is not complete, or a byte of it is another.
    """
    if not is_safetensors(folder):
        together(lambda: _check_own_files(folder))


def load_tensors(targets: dict[str, Tensor], folder: str | os.PathLike) -> None:
    """Fill tensors from a checkpoint whose files were checked. Collective.

    Args:
        targets (dict[str, Tensor]): Shards and whole tensors by their names in the checkpoint; changed in place. The
            same names on every rank.
        folder (str or PathLike): The checkpoint.

    Raises:
        CheckpointError: On every rank, if it lacks a name, or has another shape for one, all of which are listed, or
            cannot be read.
    """
    on_rank0(lambda: _check_names(targets, folder))
    try:
        dcp.load(targets, storage_reader=_reader(folder))
    except dcp.api.CheckpointException as error:
        rank, (reason, _) = min(error.failures.items())
        raise CheckpointError(f'could not load {folder}: rank {rank}: {type(reason).__name__}: {reason}') from error


def complete(folder: str | os.PathLike) -> FolderState:
    """Look at a checkpoint, and refuse one that is not complete.

    Args:
        folder (str or PathLike): The checkpoint.

    Returns:
        FolderState: Its state.

    Raises:
        CheckpointError: If it is not complete.
    """
    state = state_of(folder)
    if state.fault is not None:
        raise CheckpointError(f'{state.path} is no complete checkpoint: it {state.fault}')
    return state


def _reader(path: str | os.PathLike) -> FileSystemReader:
    return SafetensorsReader(path) if is_safetensors(path) else SafeReader(path)


def _check_own_files(folder: str | os.PathLike) -> None:
    state = complete(folder)
    check_sums(state, sorted(state.files)[dist.get_rank() :: dist.get_world_size()])


def _check_names(targets: dict[str, Tensor], folder: str | os.PathLike) -> None:
    known = tensors_in(folder)
    faults = [f'{name} is not in it' for name in targets if name not in known]
    faults += [
        f'{name} has the shape {tuple(known[name].shape)} there and {tuple(tensor.shape)} here'
        for name, tensor in targets.items()
        if name in known and known[name].shape != tensor.shape
    ]
    if faults:
        more = f'; and {len(faults) - SHOWN_FAULTS} more' if len(faults) > SHOWN_FAULTS else ''
        raise CheckpointError(
            f'{folder} does not fit: {"; ".join(faults[:SHOWN_FAULTS])}{more}. Is the model another one? load_from '
            'without resume starts from the weights that fit'
        )
