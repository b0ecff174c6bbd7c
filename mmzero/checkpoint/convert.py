"""From one format of checkpoints to another, without GPUs and without the code of the model."""

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmzero.checkpoint.plain import plain
from mmzero.checkpoint.read import read_checkpoint
from mmzero.checkpoint.safetensors_files import import_safetensors
from mmzero.checkpoint.scratch import Scratch, scratch_beside
from mmzero.checkpoint.sharded.folder import check_sums, is_sharded
from mmzero.checkpoint.sharded.layout import OPTIMIZER, WEIGHTS, join, optimizer_prefix, optimizers_in, split
from mmzero.checkpoint.sharded.load import complete, fill_alone, load_rest, tensors_in
from mmzero.checkpoint.sharded.save import save_sharded
from mmzero.checkpoint.write import write_checkpoint, written_whole
from mmzero.engines import by_name, by_number
from mmzero.errors import CheckpointError

SUFFIXES = ('.pth', '.pt', '.bin', '.safetensors')
"""Of files; any other name is that of a sharded folder."""


def convert_checkpoint(source: str, target: str, dtype: torch.dtype | None = None, weights_only: bool = False) -> None:
    """Convert a checkpoint: a sharded folder, ``.pth`` or ``.safetensors``, into another of these. Without other ranks.

    Memory: files are mapped, and what is read of a folder goes into a scratch file beside the target, shard by shard.
    A ``.safetensors`` holds weights alone, and so does a ``.bin``, a pickled dict as DeepSpeed's ``zero_to_fp32.py``
    and transformers write it. State of an optimizer needs the names of its parameters, which files of mmzero have.

    Args:
        source (str): The checkpoint.
        target (str): What to make; its suffix says of which kind. For a folder a process group has to exist.
        dtype (torch.dtype, optional): Of floating weights. Defaults to None: as they are.
        weights_only (bool): Leave everything but the weights out. Defaults to False.

    Raises:
        CheckpointError: If the source cannot be read, or the target exists or cannot be written.
    """
    if os.path.exists(target):
        raise CheckpointError(f'{target} exists; name another target, or remove it')
    suffix = Path(target).suffix
    meant = difflib.get_close_matches(suffix, SUFFIXES) if suffix and suffix not in SUFFIXES else []
    if meant:
        raise CheckpointError(f'{target} would be a folder; did you mean {meant[0]!r}? Give a folder another name')
    with scratch_beside(target) as scratch:
        checkpoint = _read(source, scratch)
        if weights_only:
            checkpoint = dict(state_dict=checkpoint['state_dict'])
        for part in WEIGHTS:
            if part in checkpoint and dtype is not None:
                checkpoint[part] = {name: _cast(value, dtype, scratch) for name, value in checkpoint[part].items()}
        _write(checkpoint, target)


def export_weights(folder: str, target: str, dtype: torch.dtype | None) -> None:
    """Write the weights of a sharded checkpoint, and its meta data, as a file in the OpenMMLab layout. On one rank.

    Args:
        folder (str): The checkpoint.
        target (str): The file, which is replaced.
        dtype (torch.dtype, optional): Of floating weights; None: as they are.

    Raises:
        CheckpointError: If the folder cannot be read, or the file written.
    """
    with scratch_beside(target) as scratch:
        checkpoint = whole_checkpoint(folder, scratch, only=('state_dict',))
        if dtype is not None:
            weights = checkpoint['state_dict'].items()
            checkpoint['state_dict'] = {name: _cast(value, dtype, scratch) for name, value in weights}
        write_checkpoint(plain({name: checkpoint[name] for name in ('meta', 'state_dict')}), target)


def _cast(value: Any, dtype: torch.dtype, scratch: Scratch) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == dtype:
        return value
    return scratch.put(value.to(dtype))


def _read(source: str, scratch: Scratch) -> dict[str, Any]:
    return whole_checkpoint(source, scratch) if is_sharded(source) else read_checkpoint(source)


def whole_checkpoint(
    folder: str | os.PathLike, scratch: Scratch, only: Sequence[str] = (*WEIGHTS, OPTIMIZER)
) -> dict[str, Any]:
    """Read a sharded checkpoint as one in the OpenMMLab layout. Without other ranks.

    Args:
        folder (str or PathLike): The checkpoint.
        scratch (Scratch): Takes its tensors.
        only (Sequence[str]): Entries of which tensors are read; others are left out. Defaults to all.

    Returns:
        dict: As a full checkpoint holds it.

    Raises:
        CheckpointError: If it is not complete, or damaged.
    """
    state = complete(folder)
    check_sums(state, state.files)
    rest, known = load_rest(folder), tensors_in(folder)
    for entry in {*WEIGHTS, OPTIMIZER} - set(only):
        rest.pop(entry, None)
        known = {name: saved for name, saved in known.items() if not name.startswith((f'{entry}/', f'{entry}.'))}
    tensors = {name: scratch.empty(saved.shape, saved.dtype) for name, saved in known.items()}
    fill_alone(tensors, folder)
    return _joined(rest, tensors)


def _joined(rest: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    checkpoint = join(rest, tensors, lambda prefix, state: _whole_optimizer(state, tensors, prefix))
    if 'ema_state_dict' in checkpoint:
        # As MMEngine's averaged models keep it.
        checkpoint['ema_state_dict']['steps'] = torch.tensor(checkpoint['ema_state_dict']['steps'])
    return checkpoint


def _whole_optimizer(rest: dict[str, Any], tensors: dict[str, Tensor], prefix: str) -> dict[str, Any]:
    """By numbers of parameters, as ``Optimizer.state_dict`` has it."""
    rest = dict(rest)
    dtypes = rest.pop('shards')
    return dict(rest, state=by_number(rest['state'], dtypes, rest['param_names'], lambda name: tensors[prefix + name]))


def _write(checkpoint: dict[str, Any], target: str) -> None:
    suffix = Path(target).suffix
    if suffix == '.safetensors':
        _write_safetensors(checkpoint, target)
    elif suffix == '.bin':
        write_checkpoint(plain(checkpoint['state_dict']), target)
    elif suffix in SUFFIXES:
        write_checkpoint(plain(checkpoint), target)
    else:
        _write_shards(checkpoint, target)


def _write_safetensors(checkpoint: dict[str, Any], target: str) -> None:
    save_file = import_safetensors().torch.save_file
    weights = {name: value for name, value in checkpoint['state_dict'].items() if isinstance(value, Tensor)}
    # It refuses tensors that share memory.
    seen: set[int] = set()
    for name, value in weights.items():
        address = value.untyped_storage().data_ptr()
        weights[name] = value.clone() if address in seen or not value.is_contiguous() else value
        seen.add(address)
    with written_whole(target) as part:
        save_file(weights, part, metadata=dict(format='pt'))


def _write_shards(checkpoint: dict[str, Any], target: str) -> None:
    tensors, rest = split(checkpoint)
    if 'ema_state_dict/steps' in tensors:
        rest['ema_state_dict']['steps'] = int(tensors.pop('ema_state_dict/steps'))
    if OPTIMIZER in checkpoint:
        states = {}
        for name, state in optimizers_in(checkpoint[OPTIMIZER]).items():
            shards, states[name] = _apart(state, checkpoint['state_dict'])
            tensors |= {f'{optimizer_prefix(name)}{key}': tensor for key, tensor in shards.items()}
        rest[OPTIMIZER] = states.get('', states)
    save_sharded(tensors, rest, target)


def _apart(state: dict[str, Any], weights: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Name an optimizer's state, and take what has a parameter's shape out of it."""
    if 'param_names' not in state:
        raise CheckpointError(
            "the source's optimizer does not name its parameters, so that its state cannot be sharded: files of "
            'mmzero do; convert the weights alone (--weights-only)'
        )
    names = [name for group in state['param_names'] for name in group]

    def is_shard(index: Any, key: str, value: Any) -> bool:
        return isinstance(index, int) and _is_like(value, weights.get(names[index]))

    shards, entries, dtypes = by_name(state['state'], state['param_names'], is_shard)
    return shards, dict(state, state=entries, shards=dtypes)


def _is_like(value: Any, weight: Any) -> bool:
    if not isinstance(value, Tensor) or not isinstance(weight, Tensor):
        return False
    return value.dim() > 0 and value.shape == weight.shape
