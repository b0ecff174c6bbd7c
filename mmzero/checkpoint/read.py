"""Reading checkpoint files: tensors and a short list of known classes, never anything else."""

import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mmengine.runner.checkpoint import CheckpointLoader
from mmengine.utils import apply_to

from mmzero._compat import alone_in_checkpoint_io, mapped_files
from mmzero.checkpoint.allowed import ALLOWED
from mmzero.checkpoint.names import clean_names
from mmzero.checkpoint.others import is_of_others, read_of_others, refuse_a_part, weights_in
from mmzero.checkpoint.plain import message_hub_state
from mmzero.checkpoint.safetensors_files import is_safetensors, read_safetensors
from mmzero.errors import CheckpointError

# Tensors larger than this stay on rank 0; the others get a placeholder.
LARGE_NUMEL = 65536

# Nor can these be sent as objects: torch pickles their storages in a way that it does not unpickle.
_UNSENT = tuple(
    value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and name.startswith(('float8', 'float4', 'uint16', 'uint32', 'uint64'))
)

_FORCE_VARIABLES = ('TORCH_FORCE_WEIGHTS_ONLY_LOAD', 'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD')


@contextmanager
def safe_loading() -> Iterator[None]:
    """Let ``torch.load`` inside, whoever calls it, read tensors and :data:`ALLOWED` classes only.

    Yields:
        None: For one rank alone; MMEngine's loaders of URLs do not wait for others inside.
    """
    # torch refuses to load where both are set, and the second one is what users of old checkpoints set.
    before = {name: os.environ.pop(name, None) for name in _FORCE_VARIABLES}
    os.environ[_FORCE_VARIABLES[0]] = '1'
    try:
        with torch.serialization.safe_globals(list(ALLOWED)), alone_in_checkpoint_io():
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def read_checkpoint(filename: str, wanted: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read a checkpoint of mmzero, MMEngine or others, or weights alone. On one rank, without communication.

    Memory: local files are mapped, so that the kernel reads what is copied out of them, and can let go of it again.
    Old ones, from before torch 1.6, and what a URL names are read whole.

    Args:
        filename (str): A path, in which ``~`` is the user's folder, that of a folder as transformers writes it, or a
            URL that MMEngine's CheckpointLoader knows.
        wanted (Mapping[str, Any], optional): The model's state dict, whose names tell what in the file's is a
            wrapper's, and which knows the shapes of flat shards. Defaults to None: not known.

    Returns:
        dict: With ``state_dict`` under clean names, and what else the file holds.

    Raises:
        CheckpointError: If it is not there, is damaged, or holds something that is not allowed.
    """
    filename = os.path.expanduser(filename)
    try:
        loaded = _load(filename, wanted or {})
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f'no checkpoint at {filename}{_others(filename)}') from None
    except Exception as error:
        # Unpickling what is no pickle may raise anything.
        raise CheckpointError(f'{filename} ({_size(filename)}) {_advice(error, filename)}') from None
    return _normalised(loaded, filename, wanted or {})


def read_meta(path: str) -> dict[str, Any]:
    """Read what a file says of the run that saved it, and no tensor. On one rank, without communication.

    Args:
        path (str): A local file.

    Returns:
        dict: Its ``meta``; empty where it is no file of mmzero's.
    """
    try:
        found = torch.load(path, map_location='cpu', mmap=True, weights_only=True)
        return dict(found['meta'])
    except Exception:  # noqa: BLE001
        # Of what is no checkpoint, anything may be raised.
        return {}


def _load(filename: str, wanted: Mapping[str, Any]) -> Any:
    if is_safetensors(filename):
        return dict(state_dict=read_safetensors(filename))
    read = partial(read_of_others, filename, wanted) if is_of_others(filename) else partial(_load_file, filename)
    with safe_loading():
        try:
            with mapped_files():
                return read()
        except (RuntimeError, ValueError) as error:
            # What torch says of files that are no zip, and of what is no file.
            if 'mmap' not in str(error):
                raise
        return read()


def _load_file(filename: str) -> Any:
    return CheckpointLoader.load_checkpoint(filename, map_location='cpu', logger='silent')


def _normalised(loaded: Any, filename: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(loaded, dict):
        raise CheckpointError(f'{filename} holds a {type(loaded).__name__}, not a dict of weights')
    state, checkpoint = weights_in(loaded, filename)
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise CheckpointError(f'{filename} holds no dict of weights by name where they should be')
    refuse_a_part(state, filename)
    checkpoint['state_dict'] = clean_names(state, wanted)
    if isinstance(checkpoint.get('message_hub'), dict):
        checkpoint['message_hub'] = message_hub_state(checkpoint['message_hub'])
    return checkpoint


def placeholders(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Copy a checkpoint for ranks that need no tensor of it: large ones, and those of float8, are on the meta device.

    Args:
        checkpoint (dict): The checkpoint on rank 0.

    Returns:
        dict: The copy.
    """

    def is_large(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and (value.numel() > LARGE_NUMEL or value.dtype in _UNSENT)

    return apply_to(checkpoint, is_large, lambda value: value.to('meta'))


def _size(filename: str) -> str:
    return f'{os.path.getsize(filename):,} bytes' if os.path.isfile(filename) else 'not a local file'


def _others(filename: str) -> str:
    folder = Path(filename).parent
    kinds = ('*.pth', '*.safetensors', '*/complete.json')
    # A sharded one is a folder, told by what lies in it.
    found = {path if path.parent == folder else path.parent for kind in kinds for path in folder.glob(kind)}
    names = sorted(path.name for path in found if path.name != Path(filename).name)
    return f'; {folder} holds {", ".join(names[-5:])}' if names else ''


def _advice(error: Exception, filename: str) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    refused = [line.strip() for line in lines if 'GLOBAL' in line or 'Unsupported global' in line]
    if isinstance(error, pickle.UnpicklingError) and refused and _starts_like_a_checkpoint(filename):
        return (
            f'holds Python objects that mmzero does not run ({refused[0]}); load it once where you trust it, '
            "and save its weights alone: torch.save(dict(state_dict=...), 'weights.pth')"
        )
    # What follows in torch's line advises to unpickle all the same.
    why = lines[0].split('. In PyTorch 2.6', 1)[0]
    return f'is no checkpoint, is damaged or was cut off ({why}); use another one{_others(filename)}'


def _starts_like_a_checkpoint(filename: str) -> bool:
    """Whether a file is a zip or a pickle; a text may happen to read as a pickle that names an object."""
    if not os.path.isfile(filename):
        return True
    with open(filename, 'rb') as file:
        return file.read(2) in (b'PK', b'\x80\x02')
