"""Disks: room for checkpoints, for shared memory, and where NVMe offload could go."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

_DISKS = ('ext2', 'ext3', 'ext4', 'xfs', 'btrfs', 'zfs', 'f2fs', 'overlay')
_NETWORK = ('nfs', 'nfs4', 'cifs', 'lustre', 'beegfs', 'gpfs', 'ceph', 'fuse.sshfs', '9p', 'virtiofs')


def probe_places() -> dict[str, Any]:
    """Look at the file systems.

    Returns:
        dict[str, Any]: ``here`` and ``shm``, free and total bytes of the working folder and of /dev/shm, and
        ``mounts``, file systems of which each says its ``path``, ``kind`` ('nvme', 'solid', 'rotating', 'virtual',
        'network' or 'unknown'), free bytes, and whether it is ``writable``.
    """
    here = os.getcwd()
    mounts = [_mount(device, path, system) for device, path, system in _mounted()]
    return dict(
        here=dict(path=here, writable=os.access(here, os.W_OK), **_room(here)),
        shm=_room('/dev/shm') if os.path.isdir('/dev/shm') else None,
        mounts=[mount for mount in mounts if mount is not None],
    )


def _room(path: str) -> dict[str, int]:
    usage = shutil.disk_usage(path)
    return dict(total=usage.total, free=usage.free)


def _mounted() -> list[tuple[str, str, str]]:
    try:
        text = Path('/proc/mounts').read_text(encoding='utf-8', errors='replace')
    except OSError:
        return []
    rows = [line.split() for line in text.splitlines()]
    found = {row[0]: (row[0], row[1], row[2]) for row in rows if len(row) > 2 and row[2] in _DISKS + _NETWORK}
    # A device that is mounted in several places is named once, where it was mounted first.
    for row in reversed(rows):
        if len(row) > 2 and row[0] in found and os.path.isdir(row[1]):
            found[row[0]] = (row[0], row[1], row[2])
    return list(found.values())


def _mount(device: str, path: str, system: str) -> dict[str, Any] | None:
    if not os.path.isdir(path):
        return None
    try:
        room = _room(path)
    except OSError:
        return None
    return dict(path=path, kind=kind_of(device, system), writable=os.access(path, os.W_OK), **room)


def kind_of(device: str, system: str, blocks: Path = Path('/sys/block')) -> str:
    """Say what is behind a file system.

    Args:
        device (str): As /proc/mounts has it.
        system (str): Its type.
        blocks (Path): Where the kernel lists disks.

    Returns:
        str: 'nvme', 'solid', 'rotating', 'virtual', 'network' or 'unknown'.
    """
    if system in _NETWORK:
        return 'network'
    name = os.path.basename(os.path.realpath(device)) if device.startswith('/dev/') else ''
    if name.startswith('nvme'):
        return 'nvme'
    if name.startswith(('vd', 'xvd')):
        # What is behind a virtual disk its kernel does not know, and says that it rotates.
        return 'virtual'
    disk = re.sub(r'\d+$', '', name)
    for candidate in (name, disk):
        file = blocks / candidate / 'queue/rotational'
        if candidate and file.is_file():
            return 'rotating' if file.read_text().strip() == '1' else 'solid'
    return 'unknown'
