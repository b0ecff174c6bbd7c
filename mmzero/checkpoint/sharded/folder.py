"""A folder that is a complete checkpoint, or none.

[Note: complete or not there]
Ranks write into ``NAME.part``. Each syncs its files and reads their checksums; rank 0 then writes a marker that lists
all files with size and checksum, syncs it and the folder, renames the folder to ``NAME``, and syncs its parent. A
process that dies before the marker is there leaves a ``.part`` that no reader takes for a checkpoint and the next save
of that name removes. Where it dies between marker and rename, whoever looks for the newest checkpoint finishes the
rename. What is lost or damaged later, the marker tells.
"""

import json
import os
import shutil
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmzero.checkpoint.others import is_of_others
from mmzero.checkpoint.safetensors_files import is_safetensors
from mmzero.errors import CheckpointError

MARKER = 'complete.json'
PART = '.part'
FORMAT = 1
"""Of the folder's layout; raised where an older mmzero could not read it."""

_CHUNK_BYTES = 2**24

Sums = dict[str, tuple[int, int]]
"""File names to size in bytes and CRC-32."""


@dataclass(frozen=True)
class FolderState:
    """What is known of a folder without reading its tensors.

    Args:
        path (Path): The folder.
        fault (str, optional): Why it is no complete checkpoint; None: it is one.
        files (Mapping[str, tuple[int, int]]): Its files, by the marker: size and CRC-32.
        holds (tuple[str, ...]): What is in it: 'optimizer', 'param_schedulers', ... Defaults to none.
    """

    path: Path
    fault: str | None
    files: Mapping[str, tuple[int, int]]
    holds: tuple[str, ...] = ()


def part_of(folder: Path) -> Path:
    """Where a checkpoint is written before it is complete.

    Args:
        folder (Path): Its folder.

    Returns:
        Path: The folder beside it.
    """
    return folder.with_name(folder.name + PART)


def begin(folder: Path) -> Path:
    """Make an empty folder to write into. On one rank of each file system.

    Args:
        folder (Path): Where the checkpoint will be.

    Returns:
        Path: Where to write.
    """
    part = part_of(folder)
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)
    return part


def sums_of(part: Path, names: Iterable[str]) -> Sums:
    """Sync files and read their checksums.

    Args:
        part (Path): Their folder.
        names (Iterable[str]): Their names.

    Returns:
        dict[str, tuple[int, int]]: Size and CRC-32 by name.
    """
    found = {}
    for name in names:
        with open(part / name, 'rb') as file:
            os.fsync(file.fileno())
        found[name] = checksum(part / name)
    return found


def checksum(path: Path) -> tuple[int, int]:
    """Read a file's size and CRC-32.

    Args:
        path (Path): The file.

    Returns:
        tuple[int, int]: The two.
    """
    size, crc = 0, 0
    with open(path, 'rb') as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return size, crc


def commit(folder: Path, sums: Sums, holds: Sequence[str]) -> None:
    """Turn what was written into a checkpoint. On rank 0, once all ranks have written.

    Args:
        folder (Path): Where the checkpoint will be; one of that name is replaced.
        sums (dict[str, tuple[int, int]]): All its files.
        holds (Sequence[str]): What is in it.
    """
    part = part_of(folder)
    with open(part / MARKER, 'w') as file:
        json.dump(dict(format=FORMAT, time=time.time(), holds=list(holds), files=sums), file)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(part)
    _put_in_place(folder)


def _put_in_place(folder: Path) -> None:
    part, old = part_of(folder), _old_of(folder)
    if os.path.lexists(folder):
        _remove(old)
        # A folder cannot take the place of one that is not empty.
        os.replace(folder, old)
    os.replace(part, folder)
    _sync_folder(folder.parent)
    _remove(old)


def _old_of(folder: Path) -> Path:
    """Where a checkpoint is while another takes its place."""
    return folder.with_name(f'{folder.name}.old{PART}')


def _remove(path: Path) -> None:
    """Remove what is there, which may be a link to a folder elsewhere, or a file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_sharded(path: str | os.PathLike) -> bool:
    """Say whether a path is a folder, complete or not, as sharded checkpoints are, and none of others.

    Args:
        path (str or PathLike): A path.

    Returns:
        bool: Whether it is; a folder as transformers or FSDPStrategy write it is none.
    """
    return os.path.isdir(path) and not is_safetensors(path) and not is_of_others(path)


def state_of(path: str | os.PathLike) -> FolderState:
    """Look whether a folder is a complete checkpoint: by its marker, and by the sizes of the files that it lists.

    Args:
        path (str or PathLike): The folder.

    Returns:
        FolderState: What was found.
    """
    folder = Path(path)
    try:
        marker = json.loads((folder / MARKER).read_text())
        files = {name: (int(size), int(crc)) for name, (size, crc) in marker['files'].items()}
    except FileNotFoundError:
        return FolderState(folder, f'has no {MARKER}: it was not finished, or is no checkpoint of mmzero', {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return FolderState(folder, f'has a damaged {MARKER} ({error})', {})
    if marker.get('format') != FORMAT:
        return FolderState(folder, f'has the format {marker.get("format")}, this mmzero reads {FORMAT}', {})
    for name, (size, _) in files.items():
        file = folder / name
        if not file.is_file():
            return FolderState(folder, f'lacks its file {name}', files)
        if file.stat().st_size != size:
            return FolderState(folder, f'has {file.stat().st_size:,} bytes of {name} instead of {size:,}', files)
    return FolderState(folder, None, files, tuple(marker.get('holds', ())))


def check_sums(state: FolderState, names: Iterable[str]) -> None:
    """Read some files of a complete checkpoint and hold them against its marker.

    Args:
        state (FolderState): Of the folder.
        names (Iterable[str]): The files.

    Raises:
        CheckpointError: If a byte of one is another.
    """
    for name in names:
        if checksum(state.path / name) != state.files[name]:
            raise CheckpointError(
                f'{state.path}: {name} was damaged after it was written (its CRC-32 is another); use another checkpoint'
            )


def finish(root: str | os.PathLike) -> None:
    """Finish the renames of checkpoints that are complete but for them. On one rank, while nobody saves.

    Args:
        root (str or PathLike): A folder of checkpoints.
    """
    parts = [part for part in Path(root).glob(f'*{PART}') if part.is_dir() and state_of(part).fault is None]
    # What was to be replaced comes last: it is put back only where nothing is there to take its place.
    for part in sorted(parts, key=lambda path: path.name.endswith(f'.old{PART}')):
        folder = part.with_name(part.name.removesuffix(PART).removesuffix('.old'))
        if part == part_of(folder):
            _put_in_place(folder)
        elif not folder.exists():
            os.replace(part, folder)
            _sync_folder(folder.parent)
        elif state_of(folder).fault is None:
            _remove(part)


def newest_complete(root: str | os.PathLike) -> tuple[Path | None, list[str]]:
    """Find the newest complete checkpoint in a folder of checkpoints from which training can go on.

    Args:
        root (str or PathLike): The folder, such as a work_dir.

    Returns:
        tuple[Path or None, list[str]]: The checkpoint, and newer ones that are not complete, with the reason. The best
        one, which MMEngine saves without the optimizer, is passed over.
    """
    if not os.path.isdir(root):
        return None, []
    finish(root)
    folders = [path for path in Path(root).iterdir() if path.is_dir() and _was_begun(path)]
    skipped: list[str] = []
    for folder in sorted(folders, key=_time_of, reverse=True):
        state = state_of(folder)
        if state.fault is not None and not folder.name.endswith(f'.old{PART}'):
            skipped.append(f'{folder.name} {state.fault}')
        elif state.fault is None and not folder.name.endswith(PART) and 'optimizer' in state.holds:
            return folder, skipped
    return None, skipped


def _time_of(path: Path) -> float:
    """When it was written, which its marker tells also of a copy."""
    try:
        return float(json.loads((path / MARKER).read_text())['time'])
    except (OSError, ValueError, KeyError, TypeError):
        return path.stat().st_mtime


def _was_begun(path: Path) -> bool:
    return path.name.endswith(PART) or (path / MARKER).exists() or any(path.glob('*.distcp'))
