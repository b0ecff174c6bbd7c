"""Running probes, each by itself and all at once: what fails is told, and stops none of the others."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .gpus import probe_gpus, probe_peers
from .judging import Facts
from .machine import probe_cpu, probe_limits, probe_memory
from .network import probe_network
from .ops import probe_builds, probe_deepspeed
from .packages import probe_packages
from .places import probe_places
from .tools import probe_compilers, probe_mmengine
from .torchs import probe_torch
from .variables import probe_variables

PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    'packages': probe_packages,
    'torch': probe_torch,
    'gpus': probe_gpus,
    'peers': probe_peers,
    'operators': probe_builds,
    'deepspeed': probe_deepspeed,
    'compilers': probe_compilers,
    'mmengine': probe_mmengine,
    'cpu': probe_cpu,
    'memory': probe_memory,
    'limits': probe_limits,
    'places': probe_places,
    'network': probe_network,
    'variables': probe_variables,
}


def probe_all() -> Facts:
    """Run all probes. Those that start other programs do it side by side.

    Returns:
        Facts: What was found.
    """
    with ThreadPoolExecutor(max_workers=len(PROBES)) as pool:
        found = {name: pool.submit(functools.partial(safely, probe)) for name, probe in PROBES.items()}
        return {name: future.result() for name, future in found.items()}


def safely(probe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run one probe.

    Args:
        probe (Callable): The probe.

    Returns:
        dict[str, Any]: What it has found, or ``{'error': ...}``.
    """
    try:
        return probe()
    except (Exception, SystemExit) as error:
        # A package that is half there may raise anything when it is imported.
        return dict(error=f'{type(error).__name__}: {error}'.strip())
