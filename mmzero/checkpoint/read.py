"""Reading checkpoint files: tensors and a short list of known classes, never anything else."""

import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from mmengine.runner.checkpoint import CheckpointLoader
from mmengine.utils import apply_to

from mmzero._compat import alone_in_checkpoint_io, mapped_files, numpy_pickle_globals
from mmzero.checkpoint.names import clean_names
from mmzero.checkpoint.plain import message_hub_state
from mmzero.checkpoint.safetensors_files import is_safetensors, read_safetensors
from mmzero.errors import CheckpointError


def _history_method(owner: Any, name: str) -> Any:
    """Stand in for ``getattr``, by which a pickled HistoryBuffer names its own methods, and allow only that."""
    if owner is HistoryBuffer and name in ('min', 'max', 'mean', 'current'):
        return getattr(owner, name)
    raise pickle.UnpicklingError(f'Unsupported global: getattr of {owner!r} and {name!r}')


# What MMEngine's own checkpoints pickle: the message hub's histories, which are numpy arrays.
ALLOWED = (
    HistoryBuffer,
    (_history_method, 'builtins.getattr'),
    np.ndarray,
    np.dtype,
    *numpy_pickle_globals(),
)

# Tensors larger than this stay on rank 0; the others get a placeholder.
LARGE_NUMEL = 65536

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


def read_checkpoint(filename: str, wanted: Iterable[str] = ()) -> dict[str, Any]:
    """Read a checkpoint of mmzero or MMEngine, or weights alone. On one rank, without communication.

    Memory: local files are mapped, so that the kernel reads what is copied out of them, and can let go of it again.
    Old ones, from before torch 1.6, and what a URL names are read whole.

    Args:
        filename (str): A path, that of a folder as transformers writes it, or a URL that MMEngine's CheckpointLoader
            knows.
        wanted (Iterable[str]): Names of the model's weights, which tell what in the file's names is a wrapper's.
            Defaults to none: not known.

    Returns:
        dict: With ``state_dict`` under clean names, and what else the file holds.

    Raises:
        CheckpointError: If it is not there, is damaged, or holds something that is not allowed.
    """
    try:
        loaded = dict(state_dict=read_safetensors(filename)) if is_safetensors(filename) else _load(filename)
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f'no checkpoint at {filename}{_others(filename)}') from None
    except Exception as error:
        # Unpickling what is no pickle may raise anything.
        raise CheckpointError(f'{filename} ({_size(filename)}) {_advice(error, filename)}') from None
    return _normalised(loaded, filename, wanted)


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


def _load(filename: str) -> Any:
    with safe_loading():
        try:
            with mapped_files():
                return CheckpointLoader.load_checkpoint(filename, map_location='cpu', logger='silent')
        except (RuntimeError, ValueError) as error:
            # What torch says of files that are no zip, and of what is no file.
            if 'mmap' not in str(error):
                raise
        return CheckpointLoader.load_checkpoint(filename, map_location='cpu', logger='silent')


def _normalised(loaded: Any, filename: str, wanted: Iterable[str]) -> dict[str, Any]:
    if not isinstance(loaded, dict):
        raise CheckpointError(f'{filename} holds a {type(loaded).__name__}, not a dict of weights')
    checkpoint = dict(loaded) if 'state_dict' in loaded else dict(state_dict=loaded.get('model', loaded))
    state = checkpoint['state_dict']
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise CheckpointError(f'{filename} holds no dict of weights by name where they should be')
    checkpoint['state_dict'] = clean_names(state, wanted)
    if isinstance(checkpoint.get('message_hub'), dict):
        checkpoint['message_hub'] = message_hub_state(checkpoint['message_hub'])
    return checkpoint


def placeholders(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Copy a checkpoint with its large tensors on the meta device, to be sent to ranks that need none of them.

    Args:
        checkpoint (dict): The checkpoint on rank 0.

    Returns:
        dict: The copy.
    """

    def is_large(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.numel() > LARGE_NUMEL

    return apply_to(checkpoint, is_large, lambda value: value.to('meta'))


def _size(filename: str) -> str:
    return f'{os.path.getsize(filename):,} bytes' if os.path.isfile(filename) else 'not a local file'


def _others(filename: str) -> str:
    folder = Path(filename).expanduser().parent
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
    return f'is no checkpoint, is damaged or was cut off ({lines[0]}); use another one{_others(filename)}'


def _starts_like_a_checkpoint(filename: str) -> bool:
    """Whether a file is a zip or a pickle; a text may happen to read as a pickle that names an object."""
    if not os.path.isfile(filename):
        return True
    with open(filename, 'rb') as file:
        return file.read(2) in (b'PK', b'\x80\x02')
