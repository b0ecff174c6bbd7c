"""The report as text and as data."""

from collections.abc import Iterator
from typing import Any

from .judging import Facts, Part
from .verdicts import GIB


def as_dict(facts: Facts, parts: list[Part]) -> dict[str, Any]:
    """Give the report as data.

    Args:
        facts (Facts): What was found.
        parts (list[Part]): What works.

    Returns:
        dict[str, Any]: ``facts`` and ``parts``.
    """
    listed = [dict(name=one.name, works=one.works, missing=one.missing, remarks=one.remarks) for one in parts]
    return dict(facts=facts, parts=listed)


def as_text(facts: Facts, parts: list[Part]) -> str:
    """Write the report.

    Args:
        facts (Facts): What was found.
        parts (list[Part]): What works.

    Returns:
        str: Lines.
    """
    lines = []
    for title, rows in _SECTIONS.items():
        name = title.lower().split()[0]
        found = facts.get(_OF.get(name, name), {})
        lines.append(title)
        lines += [
            f'  {row}' for row in ([f'could not be looked at: {found["error"]}'] if 'error' in found else rows(found))
        ]
    lines.append('What works here, and what is missing')
    for part in parts:
        lines.append(f'  {"yes" if part.works else "no ":3} {part.name}')
        lines += [f'        missing: {text}' for text in part.missing]
        lines += [f'        {text}' for text in part.remarks]
    return '\n'.join(lines)


def size(number: float | None) -> str:
    """Write an amount of memory.

    Args:
        number (float, optional): Bytes.

    Returns:
        str: In GiB, or MiB where it is little.
    """
    if number is None:
        return 'unlimited'
    return f'{number / GIB:.1f} GiB' if number >= GIB / 2 else f'{number / 2**20:.0f} MiB'


def _packages(found: dict[str, Any]) -> Iterator[str]:
    for name, one in found.items():
        wanted = f', mmzero wants {one["wanted"]}' if one['wanted'] else ''
        verdict = {False: ': DOES NOT FIT', None: '', True: ''}[one['fits']]
        of = f' ({one["distribution"]})' if one['distribution'] not in (None, name) else ''
        yield f'{name:14} {one["version"] or "missing"}{of}{wanted}{verdict}'


def _torch(found: dict[str, Any]) -> Iterator[str]:
    cuda = f'CUDA {found["cuda"]}' if found['cuda'] else f'ROCm {found["hip"]}' if found['hip'] else 'a CPU build'
    yield f'{found["version"]}, {cuda}, NCCL {found["nccl"] or "none"}, gloo {"yes" if found["gloo"] else "no"}'
    yield f'sees {found["gpus"]} GPU(s)'


def _gpus(found: dict[str, Any]) -> Iterator[str]:
    yield f'driver {found["driver"] or "none"}'
    for one in found['gpus']:
        total, free = (size(None if one[name] is None else one[name] * 2**20) for name in ('total_mib', 'free_mib'))
        yield f'{one["index"]}: {one["name"]}, {total}, {free} free, compute capability {one["capability"]}'


def _ops(found: dict[str, Any]) -> Iterator[str]:
    yield f'mmcv: {found["mmcv"] or "none"}'
    yield f'built in {found["root"]}, {len(found["locks"])} lock(s)'


def _deepspeed(found: dict[str, Any]) -> Iterator[str]:
    for state in ('installed', 'built', 'compatible', 'missing'):
        names = [name for name, one in found.items() if one == state]
        if names:
            yield f'{state}: {", ".join(names)}'
    if not found:
        yield 'none'


def _compilers(found: dict[str, Any]) -> Iterator[str]:
    yield ', '.join(f'{name}: {_plain(value)}' for name, value in found.items())


def _plain(value: Any) -> str:
    return {None: 'none', True: 'yes', False: 'no'}.get(value, str(value)) if not isinstance(value, str) else value


def _mmengine(found: dict[str, Any]) -> Iterator[str]:
    yield from (f'{name}: {" ".join(value.split())}' for name, value in found.items())


def _cpu(found: dict[str, Any]) -> Iterator[str]:
    quota = '' if found['quota'] is None else f', {found["quota"]:g} by the cgroup'
    flags = ' '.join(found['flags']) or 'no vector instructions'
    yield f'{found["model"]}, {found["cores"]} core(s), {found["usable"]} usable{quota}; {flags}'


def _memory(found: dict[str, Any]) -> Iterator[str]:
    limit = size(found['limit'])
    yield f'{size(found["total"])}, {size(found["available"])} available, swap {size(found["swap"])}, cgroup {limit}'


def _limits(found: dict[str, Any]) -> Iterator[str]:
    for name, value in found.items():
        shown = size(value) if 'memory' in name else 'unlimited' if value is None else str(value)
        yield f'{name.replace("_", " ")}: {shown}'


def _disks(found: dict[str, Any]) -> Iterator[str]:
    here, shm = found['here'], found['shm']
    yield f'here, {here["path"]}: {size(here["free"])} free{"" if here["writable"] else ", NOT WRITABLE"}'
    yield '/dev/shm: ' + ('none' if shm is None else f'{size(shm["free"])} of {size(shm["total"])} free')
    for one in found['mounts']:
        may = 'writable' if one['writable'] else 'not writable'
        yield f'{one["path"]}: {one["kind"]}, {size(one["free"])} free, {may}'


def _network(found: dict[str, Any]) -> Iterator[str]:
    for one in found['interfaces']:
        speed = '' if one['mbits'] is None else f', {one["mbits"]} Mbit/s'
        yield f'{one["name"]}: {one["state"]}{speed}{", loopback" if one["loopback"] else ""}'
    yield f'InfiniBand: {", ".join(found["infiniband"]) or "none"}'
    for name, one in found['chosen'].items():
        yield f'{name}={one["value"]} means {", ".join(one["means"]) or "NO INTERFACE"}'


def _variables(found: dict[str, Any]) -> Iterator[str]:
    yield from (f'{name}={value}' for name, value in found.items())


_SECTIONS = {
    'Packages': _packages,
    'Torch': _torch,
    'GPUs': _gpus,
    'Operators': _ops,
    "DeepSpeed's operators": _deepspeed,
    'Compilers': _compilers,
    "MMEngine's collect_env": _mmengine,
    'CPU': _cpu,
    'Memory': _memory,
    'Limits': _limits,
    'Disks': _disks,
    'Network': _network,
    'Variables': _variables,
}
_OF = {"deepspeed's": 'deepspeed', "mmengine's": 'mmengine', 'disks': 'places'}
"""Sections whose probe has another name."""
