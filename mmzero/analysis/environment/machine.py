"""Cores, memory and limits of this process."""

import os
import platform
import resource
from pathlib import Path
from typing import Any

_FLAGS = ('avx2', 'avx512f', 'avx512_bf16', 'avx512_fp16', 'amx_bf16')
_UNLIMITED = 2**60


def probe_cpu() -> dict[str, Any]:
    """Look at the cores.

    Returns:
        dict[str, Any]: ``cores`` of the machine, ``usable`` by this process, ``quota`` of its cgroup in cores,
        ``model`` and the ``flags`` that matter for 16 bit.
    """
    info = _read('/proc/cpuinfo')
    lines = dict(line.split(':', 1) for line in info.splitlines() if ':' in line)
    fields = {name.strip(): value.strip() for name, value in lines.items()}
    flags = set(fields.get('flags', fields.get('Features', '')).split())
    return dict(
        model=fields.get('model name') or platform.processor() or platform.machine(),
        cores=os.cpu_count(),
        usable=len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count(),
        quota=_cpu_quota(),
        flags=[flag for flag in _FLAGS if flag in flags],
    )


def probe_memory() -> dict[str, Any]:
    """Look at the host's memory.

    Returns:
        dict[str, Any]: Bytes: ``total``, ``available``, ``swap``, and ``limit`` of this process's cgroup.
    """
    lines = (line.split(':', 1) for line in _read('/proc/meminfo').splitlines() if ':' in line)
    sizes = {name: int(value.split()[0]) * 1024 for name, value in lines}
    return dict(
        total=sizes.get('MemTotal'),
        available=sizes.get('MemAvailable'),
        swap=sizes.get('SwapTotal'),
        limit=_memory_limit(),
    )


def probe_limits() -> dict[str, Any]:
    """Look at the limits of this process.

    Returns:
        dict[str, Any]: Soft limits; None for unlimited.
    """
    names = dict(
        locked_memory='RLIMIT_MEMLOCK', open_files='RLIMIT_NOFILE', processes='RLIMIT_NPROC', memory='RLIMIT_AS'
    )
    soft = {name: resource.getrlimit(getattr(resource, key))[0] for name, key in names.items()}
    return {name: None if value == resource.RLIM_INFINITY else value for name, value in soft.items()}


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding='utf-8', errors='replace')
    except OSError:
        return ''


def _cgroup_file(name: str, old: str) -> str:
    """A file of this process's cgroup, of version 2 or 1; the nearest one above that has it."""
    own = next(
        (line.split(':', 2)[2] for line in _read('/proc/self/cgroup').splitlines() if line.startswith('0::')), '/'
    )
    folder = Path('/sys/fs/cgroup') / own.lstrip('/')
    for place in (folder, *folder.parents):
        text = _read(str(place / name)).strip()
        if text or place == Path('/sys/fs/cgroup'):
            break
    return text or _read(f'/sys/fs/cgroup/{old}').strip()


def _memory_limit() -> int | None:
    text = _cgroup_file('memory.max', 'memory/memory.limit_in_bytes')
    return int(text) if text.isdigit() and int(text) < _UNLIMITED else None


def _cpu_quota() -> float | None:
    text = _cgroup_file('cpu.max', 'cpu/cpu.cfs_quota_us').split()
    if not text or not text[0].isdigit():
        return None
    period = text[1] if len(text) > 1 else _read('/sys/fs/cgroup/cpu/cpu.cfs_period_us').strip()
    return int(text[0]) / int(period or 100000)
