"""Writing checkpoint files so that a reader finds a whole one or none."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.fileio import LocalBackend, get_file_backend
from mmengine.runner.checkpoint import save_checkpoint

from mmzero.errors import CheckpointError


def write_checkpoint(checkpoint: dict[str, Any], path: str, backend_args: dict | None = None) -> None:
    """Write a checkpoint. On one rank, without communication.

    A local file appears under its name only when it is complete and on disk; until then it has the suffix
    ``.part``.

    Args:
        checkpoint (dict): Plain values and tensors.
        path (str): Where; any path of MMEngine's file backends.
        backend_args (dict, optional): As MMEngine's. Defaults to None.

    Raises:
        CheckpointError: If it could not be written, for example on a full disk.
    """
    if not isinstance(get_file_backend(path, backend_args=backend_args), LocalBackend):
        save_checkpoint(checkpoint, path, backend_args=backend_args)
        return
    with written_whole(path) as part, open(part, 'wb') as file:
        torch.save(checkpoint, file)


@contextmanager
def written_whole(path: str) -> Iterator[str]:
    """Have a local file appear under its name once it is complete and on disk.

    Args:
        path (str): The file.

    Yields:
        str: Where to write it: the same with the suffix ``.part``.

    Raises:
        CheckpointError: If it could not be written, for example on a full disk.
    """
    part = f'{path}.part'
    try:
        os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
        yield part
        # Some libraries make files that nobody else may read.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(part, 0o666 & ~mask)
        with open(part, 'rb') as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except Exception as error:
        raise CheckpointError(f'could not save {path}: {error}') from error
    finally:
        if os.path.isfile(part):
            os.remove(part)
