"""What DeepSpeed saves itself: a folder with files of every rank, or the universal form that its tool makes of one.

[Note: the universal form]
``zero/NAME/fp32.pt`` holds a trained parameter whole. Frozen ones and buffers lie in the files of the ranks, which the
tool copies: buffers in each, and at stage 3 of a frozen parameter a part.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmzero.engines import joined_weights, this_device
from mmzero.errors import CheckpointError, ConfigError

MODEL_FILES, OPTIMIZER_FILES = '*_model_states.pt', '*_optim_states.pt'
_LATEST = 'latest'


def deepspeed_folder(path: Path) -> Path | None:
    """Find the folder of files that a path means.

    Args:
        path (Path): That folder, or the one above it, where ``latest`` names it.

    Returns:
        Path, optional: The folder; None where it is no checkpoint of DeepSpeed.
    """
    if any(path.glob(MODEL_FILES)):
        return path
    latest = path / _LATEST
    inside = path / latest.read_text(errors='replace').strip() if latest.is_file() else path
    return inside if inside != path and any(inside.glob(MODEL_FILES)) else None


def read_deepspeed(folder: Path) -> dict[str, Any]:
    """Read the weights, and what the run has said of itself. On one rank, within ``safe_loading``.

    Args:
        folder (Path): As :func:`deepspeed_folder` gives it.

    Returns:
        dict: ``state_dict`` in float32 where DeepSpeed has kept it, and ``meta`` where there is one. State of the
        optimizer lies by groups of DeepSpeed's, and is left out.

    Raises:
        CheckpointError: If it cannot be joined, with what to do.
    """
    first = _read(min(folder.glob(MODEL_FILES), key=_rank))
    meta = dict(meta=first['meta']) if isinstance(first.get('meta'), dict) else {}
    # Those of stage 3 are empty, of others of 16 bit rounded, but at stage 1 the only ones of what is frozen.
    own = {name: value for name, value in (first.get('module') or {}).items() if not _is_empty(value)}
    trained = {name for group in first.get('param_shapes') or () for name in group}
    if (folder / 'zero').is_dir():
        joined = _universal(folder)
    elif any(folder.glob(OPTIMIZER_FILES)):
        joined = _joined(folder)
    elif own and not trained:
        # Without ZeRO one rank saves all.
        joined = {}
    else:
        raise CheckpointError(f'{folder} is a checkpoint of DeepSpeed that lacks {OPTIMIZER_FILES} with its weights')
    return dict(meta, state_dict=own | joined)


def _joined(folder: Path) -> dict[str, Tensor]:
    try:
        return joined_weights(folder, this_device().type)
    except ConfigError as error:
        raise CheckpointError(
            f'{folder} is a checkpoint of DeepSpeed, which joins it itself and cannot be imported here: install '
            "'mmzero[deepspeed]', with DS_ACCELERATOR unset or set to this device; or join it elsewhere: "
            f'python {folder.parent}/zero_to_fp32.py {folder.parent} TARGET --tag {folder.name}; then load_from=TARGET'
        ) from error
    except pickle.UnpicklingError:
        raise
    except Exception as error:
        raise CheckpointError(f'{folder} is a checkpoint of DeepSpeed, which cannot join it: {error}') from error


def _is_empty(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 0


def _universal(folder: Path) -> dict[str, Tensor]:
    ranks = [_read(file) for file in sorted(folder.glob(MODEL_FILES), key=_rank)]
    shapes = {name: shape for group in ranks[0]['param_shapes'] for name, shape in group.items()}
    files = {name: folder / 'zero' / name / 'fp32.pt' for name in shapes}
    missing = [name for name, file in files.items() if not file.is_file()]
    if missing:
        raise CheckpointError(f'{folder} lacks zero/{missing[0]}/fp32.pt, and {len(missing) - 1} more like it')
    found = {name: _parameter(file).view(shapes[name]) for name, file in files.items()}
    for name, shape in (ranks[0].get('frozen_param_shapes') or {}).items():
        whole = torch.cat([rank['frozen_param_fragments'][name].flatten() for rank in ranks])
        found[name] = whole[: shape.numel()].view(shape)
    tied = ranks[0].get('shared_params') or {}
    return found | {name: found[same] for name, same in tied.items() if same in found}


def _parameter(file: Path) -> Tensor:
    value = _read(file)
    return value['param'] if isinstance(value, dict) else value


def _rank(file: Path) -> list[int]:
    """By numbers, so that rank 10 comes after rank 9."""
    return [int(word) for word in file.name.split('_') if word.isdigit()]


def _read(file: Path) -> Any:
    return torch.load(file, map_location='cpu', weights_only=True, mmap=True)
