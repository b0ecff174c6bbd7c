"""GPUs, as the driver's own program lists them."""

import shutil
from typing import Any

from .children import printed_by, told_by_python

_FIELDS = ('index', 'name', 'memory.total', 'memory.free', 'driver_version', 'compute_cap')


def probe_gpus() -> dict[str, Any]:
    """List the GPUs of this machine, whether or not torch can use them.

    Returns:
        dict[str, Any]: ``driver`` (None without one) and ``gpus``, each with its name, memory in MiB and compute
        capability.
    """
    if shutil.which('nvidia-smi') is None:
        return dict(driver=None, gpus=[])
    query = ','.join(_FIELDS)
    text = printed_by(['nvidia-smi', f'--query-gpu={query}', '--format=csv,noheader,nounits'], seconds=20)
    return parse_gpus(text)


def parse_gpus(text: str) -> dict[str, Any]:
    """Read what nvidia-smi has printed.

    Args:
        text (str): A line per GPU, its fields with commas.

    Returns:
        dict[str, Any]: As :func:`probe_gpus` gives it.
    """
    found: dict[str, Any] = dict(driver=None, gpus=[])
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(',')]
        if len(cells) != len(_FIELDS):
            continue
        index, name, total, free, found['driver'], capability = cells
        gpu = dict(index=int(index), name=name, total_mib=_number(total), free_mib=_number(free))
        found['gpus'].append(dict(gpu, capability=_number(capability)))
    return found


def _number(text: str) -> float | None:
    """A field may be '[N/A]'."""
    try:
        return float(text)
    except ValueError:
        return None


_PEERS = """
import json, torch
n = torch.cuda.device_count()
can = torch.cuda.can_device_access_peer
print(json.dumps([[i, j] for i in range(n) for j in range(n) if i != j and not can(i, j)]))
"""


def probe_peers() -> dict[str, Any]:
    """Ask torch which GPUs reach each other's memory, in a process of its own, since that initialises CUDA.

    Returns:
        dict[str, Any]: ``apart``, pairs of GPUs that do not; None where there are not two of them.
    """
    if len(probe_gpus()['gpus']) < 2:
        return dict(apart=None)
    return dict(apart=told_by_python(_PEERS))
