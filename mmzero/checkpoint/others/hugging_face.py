"""Hugging Face's pickled weights: one ``pytorch_model.bin``, or parts of it with an index."""

from pathlib import Path
from typing import Any

import torch

from mmzero.checkpoint.others.index import names_by_file
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
    weights: dict[str, Any] = {}
    for file, wanted in names_by_file(index).items():
        held = _read(file)
        lost = wanted - held.keys()
        if lost:
            raise CheckpointError(f'{index} names {min(lost)!r} in {file.name}, which does not hold it')
        weights |= {name: held[name] for name in wanted}
    return weights


def _read(file: Path) -> dict[str, Any]:
    return torch.load(file, map_location='cpu', weights_only=True)
