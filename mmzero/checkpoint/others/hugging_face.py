"""Hugging Face's pickled weights: one ``pytorch_model.bin``, or parts of it with an index."""

import json
from pathlib import Path
from typing import Any

import torch

from mmzero.errors import CheckpointError

SINGLE = 'pytorch_model.bin'
INDEX = 'pytorch_model.bin.index.json'


def read_parts(path: Path) -> dict[str, Any]:
    """Read the weights. On one rank, within :func:`mmzero.checkpoint.read.safe_loading`.

    Args:
        path (Path): The index, or the folder that holds it or a file in one piece.

    Returns:
        dict: Weights by name.

    Raises:
        CheckpointError: If the index cannot be read, or names a file or a weight that is not there.
    """
    index = path if path.is_file() else path / INDEX
    if not index.is_file():
        return _read(path / SINGLE)
    names = _names_by_file(index)
    missing = [file for file in names if not (index.parent / file).is_file()]
    if missing:
        raise CheckpointError(f'{index} names {", ".join(missing)}, which {index.parent} does not hold')
    weights: dict[str, Any] = {}
    for file, wanted in names.items():
        held = _read(index.parent / file)
        lost = wanted - held.keys()
        if lost:
            raise CheckpointError(f'{index} names {min(lost)!r} in {file}, which does not hold it')
        weights |= {name: held[name] for name in wanted}
    return weights


def _read(file: Path) -> dict[str, Any]:
    return torch.load(file, map_location='cpu', weights_only=True)


def _names_by_file(index: Path) -> dict[str, set[str]]:
    try:
        files = json.loads(index.read_text())['weight_map']
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f'{index} is no index of weights: {type(error).__name__}: {error}') from error
    names: dict[str, set[str]] = {}
    for name, file in files.items():
        # Files lie beside the index; a path would leave the folder.
        names.setdefault(Path(file).name, set()).add(name)
    return dict(sorted(names.items()))
