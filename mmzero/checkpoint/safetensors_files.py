"""Weights in ``.safetensors`` files: one, or a folder as transformers writes it."""

import importlib
import os
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader

from mmzero.checkpoint.others.index import names_by_file
from mmzero.errors import CheckpointError

SUFFIX = '.safetensors'
INDEX = f'{SUFFIX}.index.json'


def is_safetensors(path: str | os.PathLike) -> bool:
    """Say whether a path is a ``.safetensors`` file, the index of several, or a folder of these.

    Args:
        path (str or PathLike): A path.

    Returns:
        bool: Whether it is.
    """
    if os.path.isdir(path):
        return any(Path(path).glob(f'*{SUFFIX}'))
    return str(path).endswith((SUFFIX, INDEX))


def files_of(path: str | os.PathLike) -> list[str]:
    """The files of which a set of weights consists.

    Args:
        path (str or PathLike): As :func:`is_safetensors` takes it. A folder is read by its index, or has one file.

    Returns:
        list[str]: Their paths.

    Raises:
        CheckpointError: If one is missing, the folder holds several and no index, or it is a URL.
    """
    if '://' in str(path):
        raise CheckpointError(f'{path}: {SUFFIX} are read from local files, not from a URL; download them first')
    index = _index_of(Path(path))
    if index is None:
        return [str(_only_file(Path(path)))]
    return [str(file) for file in names_by_file(index)]


def _index_of(path: Path) -> Path | None:
    if str(path).endswith(INDEX):
        return path
    found = sorted(path.glob(f'*{INDEX}')) if path.is_dir() else []
    if len(found) > 1:
        raise CheckpointError(f'{path} holds {", ".join(file.name for file in found)}; name one of them')
    return found[0] if found else None


def _only_file(path: Path) -> Path:
    files = sorted(path.glob(f'*{SUFFIX}')) if path.is_dir() else [path]
    if len(files) > 1:
        raise CheckpointError(f'{path} holds {", ".join(file.name for file in files)} and no index; name one of them')
    return files[0]


def read_safetensors(path: str | os.PathLike) -> dict[str, Tensor]:
    """Read weights, whose memory is the files', mapped. On one rank, without communication.

    Args:
        path (str or PathLike): As :func:`is_safetensors` takes it.

    Returns:
        dict[str, Tensor]: By name.

    Raises:
        CheckpointError: If a file is missing or damaged, or the package safetensors is.
    """
    safetensors = import_safetensors()
    found: dict[str, Tensor] = {}
    for source in files_of(path):
        try:
            with safetensors.safe_open(source, framework='pt') as file:
                found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(f'{source} is damaged or was cut off: {error}') from error
    return found


def import_safetensors() -> Any:
    """Get hold of the package.

    Returns:
        ModuleType: safetensors, with its part for torch.

    Raises:
        CheckpointError: If it is not installed.
    """
    try:
        importlib.import_module('safetensors.torch')
        return importlib.import_module('safetensors')
    except ImportError:
        raise CheckpointError(f'{SUFFIX} files need the package safetensors: pip install safetensors') from None


class SafetensorsReader(HuggingFaceStorageReader):
    """DCP's reader of a folder of ``.safetensors`` files, of those that belong together.

    Args:
        path (str or PathLike): As :func:`is_safetensors` takes it.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        import_safetensors()
        files = files_of(path)
        super().__init__(os.path.dirname(files[0]))
        self.fs: Any = _Listing(files)


class _Listing:
    """What the reader asks of a file system: the files of a folder."""

    def __init__(self, files: list[str]) -> None:
        self._files = files

    def ls(self, path: str) -> list[str]:
        return self._files
