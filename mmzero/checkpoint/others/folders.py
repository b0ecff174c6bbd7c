"""Folders of others that are one checkpoint."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmzero.checkpoint.others.deepspeed_folder import deepspeed_folder, read_deepspeed
from mmzero.checkpoint.others.fsdp_local import FIRST_FILE, read_local
from mmzero.checkpoint.others.hugging_face import INDEX, SINGLE, read_parts


def is_of_others(path: str | os.PathLike) -> bool:
    """Say whether something is a checkpoint of several files that is none of mmzero's.

    Args:
        path (str or PathLike): A path.

    Returns:
        bool: Whether :func:`read_of_others` is to read it.
    """
    folder = Path(path)
    if folder.name.endswith('.bin.index.json'):
        return folder.is_file()
    return (
        any((folder / name).is_file() for name in (FIRST_FILE, INDEX, SINGLE)) or deepspeed_folder(folder) is not None
    )


def read_of_others(path: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Read a checkpoint of several files, within :func:`mmzero.checkpoint.read.safe_loading`. On one rank.

    Args:
        path (str): The folder, or an index of Hugging Face.
        wanted (Mapping[str, Any]): The model's state dict; empty where it is not known.

    Returns:
        dict: As one file would hold it.

    Raises:
        CheckpointError: If it cannot be read, or not by this.
    """
    folder = Path(path)
    if folder.is_file() or (folder / INDEX).is_file() or (folder / SINGLE).is_file():
        return read_parts(folder)
    if (folder / FIRST_FILE).is_file():
        return read_local(folder, wanted)
    return read_deepspeed(deepspeed_folder(folder) or folder)
