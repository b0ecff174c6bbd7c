"""Network interfaces, and which of them NCCL and gloo were told to use. No addresses."""

import os
import socket
from pathlib import Path
from typing import Any

_CHOICES = ('NCCL_SOCKET_IFNAME', 'GLOO_SOCKET_IFNAME', 'TP_SOCKET_IFNAME')


def probe_network() -> dict[str, Any]:
    """Look at the network.

    Returns:
        dict[str, Any]: ``interfaces`` with their state and speed in Mbit/s, ``infiniband`` devices, and ``chosen``:
        by variable what it says and the interfaces that it means here.
    """
    names = [name for _, name in socket.if_nameindex()]
    chosen = {
        name: dict(value=os.environ[name], means=meant(name, os.environ[name], names))
        for name in _CHOICES
        if os.environ.get(name)
    }
    folder = Path('/sys/class/infiniband')
    return dict(
        interfaces=[_interface(name) for name in names],
        infiniband=sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else [],
        chosen=chosen,
    )


def _interface(name: str) -> dict[str, Any]:
    folder = Path('/sys/class/net') / name
    speed = _read(folder / 'speed')
    return dict(
        name=name,
        state=_read(folder / 'operstate') or 'unknown',
        mbits=int(speed) if speed.isdigit() else None,
        loopback=name == 'lo' or _read(folder / 'type') == '772',
    )


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # of some drivers, and of interfaces that are down
        return ''


def meant(variable: str, value: str, names: list[str]) -> list[str]:
    """Find the interfaces that a variable means.

    Args:
        variable (str): NCCL's takes beginnings of names, ``=`` before it for whole names, ``^`` for all others; those
            of gloo and TensorPipe take whole names.
        value (str): Names with commas.
        names (list[str]): The interfaces of this machine.

    Returns:
        list[str]: Those that it means.
    """
    if variable != 'NCCL_SOCKET_IFNAME':
        return [name for name in names if name in value.split(',')]
    others = value.startswith('^')
    exact = value.lstrip('^').startswith('=')
    asked = [item for item in value.lstrip('^=').split(',') if item]
    fits = {name for name in names if any(name == item if exact else name.startswith(item) for item in asked)}
    return [name for name in names if (name in fits) != others]
