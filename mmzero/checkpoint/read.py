"""Reading checkpoint files: tensors and a short list of known classes, never anything else."""

import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from mmengine.runner.checkpoint import CheckpointLoader
from mmengine.utils import apply_to

from mmzero._compat import alone_in_checkpoint_io, numpy_pickle_globals
from mmzero.checkpoint.names import clean_name
from mmzero.checkpoint.plain import message_hub_state
from mmzero.errors import CheckpointError

# What MMEngine's own checkpoints pickle: the message hub's histories, which are numpy arrays.
ALLOWED = (HistoryBuffer, np.ndarray, np.dtype, *numpy_pickle_globals())

# Tensors larger than this stay on rank 0; the others get a placeholder.
LARGE_NUMEL = 65536


@contextmanager
def safe_loading() -> Iterator[None]:
    """Let ``torch.load`` inside, whoever calls it, read tensors and :data:`ALLOWED` classes only.

    Yields:
        None: For one rank alone; MMEngine's loaders of URLs do not wait for others inside.
    """
    variable = 'TORCH_FORCE_WEIGHTS_ONLY_LOAD'
    before = os.environ.get(variable)
    os.environ[variable] = '1'
    try:
        with torch.serialization.safe_globals(list(ALLOWED)), alone_in_checkpoint_io():
            yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def read_checkpoint(filename: str) -> dict[str, Any]:
    """Read a checkpoint of mmzero or MMEngine, or a bare state dict. On one rank, without communication.

    Args:
        filename (str): A path, or a URL that MMEngine's CheckpointLoader knows.

    Returns:
        dict: With ``state_dict`` under clean names, and what else the file holds.

    Raises:
        CheckpointError: If it is not there, is damaged, or holds something that is not allowed.
    """
    try:
        with safe_loading():
            loaded = CheckpointLoader.load_checkpoint(filename, map_location='cpu', logger=None)
    except FileNotFoundError:
        raise CheckpointError(f'no checkpoint at {filename}{_others(filename)}') from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(f'{filename}: {_unpickling_advice(str(error))}') from None
    except (RuntimeError, EOFError, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f'{filename} ({_size(filename)}) is damaged or was cut off ({first}); use another one{_others(filename)}'
        ) from None
    return _normalised(loaded, filename)


def _normalised(loaded: Any, filename: str) -> dict[str, Any]:
    if not isinstance(loaded, dict):
        raise CheckpointError(f'{filename} holds a {type(loaded).__name__}, not a dict of weights')
    checkpoint = dict(loaded) if 'state_dict' in loaded else dict(state_dict=loaded.get('model', loaded))
    # MMEngine's loader sets attributes on the state dict, which a plain dict has not.
    named = ((clean_name(name), value) for name, value in checkpoint['state_dict'].items())
    checkpoint['state_dict'] = OrderedDict(named)
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
    names = sorted(path.name for path in folder.glob('*.pth') if path.name != Path(filename).name)
    return f'; {folder} holds {", ".join(names[-5:])}' if names else ''


def _unpickling_advice(message: str) -> str:
    for line in message.splitlines():
        if 'GLOBAL' in line or 'Unsupported' in line:
            return (
                f'holds Python objects that mmzero does not run ({line.strip()}); load it once where you trust it, '
                "and save its weights alone: torch.save(dict(state_dict=...), 'weights.pth')"
            )
    return f'is not a checkpoint, is damaged or was cut off ({message.splitlines()[0]})'
