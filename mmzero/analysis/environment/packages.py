"""Packages: their versions beside those that setup.py asks for. None is imported."""

import ast
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Any

SETUP = Path(__file__).resolve().parents[3] / 'setup.py'

# The name that is imported, and the distributions that bring it.
PACKAGES: dict[str, tuple[str, ...]] = {
    'torch': ('torch',),
    'torchvision': ('torchvision',),
    'triton': ('triton', 'pytorch-triton', 'triton-windows'),
    'mmengine': ('mmengine', 'mmengine-lite'),
    'mmcv': ('mmcv', 'mmcv-lite', 'mmcv-full'),
    'mmdet': ('mmdet',),
    'mmpretrain': ('mmpretrain',),
    'mmseg': ('mmsegmentation',),
    'transformers': ('transformers',),
    'peft': ('peft',),
    'safetensors': ('safetensors',),
    'timm': ('timm',),
    'deepspeed': ('deepspeed',),
    'addict': ('addict',),
    'yapf': ('yapf',),
    'setuptools': ('setuptools',),
    'numpy': ('numpy',),
    'pycocotools': ('pycocotools',),
    'pytest': ('pytest',),
    'ninja': ('ninja',),
}

# A distribution that may take another one's place, at the same versions.
_SAME_VERSIONS = {'mmcv': 'mmcv-lite', 'mmcv-full': 'mmcv-lite'}


def probe_packages() -> dict[str, Any]:
    """Find the packages that parts of mmzero want.

    Returns:
        dict[str, Any]: For each ``version`` (None where it is missing), ``distribution``, ``wanted`` (what setup.py
        asks for), and ``fits``: whether it does; None where that cannot be told.
    """
    wanted = requirements()
    return {name: _package(name, distributions, wanted) for name, distributions in PACKAGES.items()}


def _package(name: str, distributions: tuple[str, ...], wanted: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = dict(version=None, distribution=None, wanted=None, fits=None)
    for distribution in distributions:
        asked = wanted.get(_SAME_VERSIONS.get(distribution, distribution))
        found['wanted'] = found['wanted'] or asked
        if find(name) is None:
            continue
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return dict(version=version, distribution=distribution, wanted=asked, fits=_fits(version, asked))
    if find(name) is not None:
        found['version'] = 'unknown'
    return found


def find(name: str) -> Any:
    """Find a package without importing it.

    Args:
        name (str): What is imported.

    Returns:
        ModuleSpec or None: Where it is; None where it cannot be imported.
    """
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def requirements() -> dict[str, str]:
    """Read what mmzero asks for, extras included.

    Returns:
        dict[str, str]: Distribution to the versions, such as '>=2.0,<2.2'; '' for any.
    """
    try:
        lines = _of_setup(SETUP.read_text(encoding='utf-8'))
    except (OSError, SyntaxError, ValueError):
        try:
            lines = importlib.metadata.requires('mmzero') or []
        except importlib.metadata.PackageNotFoundError:
            return {}
    found: dict[str, str] = {}
    for line in lines:
        match = re.match(r'([A-Za-z0-9._-]+)(?:\[.*?\])?\s*\(?([^;)]*)', line)
        if match and not found.get(match[1]):
            found[match[1]] = match[2].strip()
    return found


def _of_setup(text: str) -> list[str]:
    lines: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.keyword) and node.arg == 'install_requires':
            lines += ast.literal_eval(node.value)
        elif isinstance(node, ast.keyword) and node.arg == 'extras_require':
            lines += [line for extra in ast.literal_eval(node.value).values() for line in extra]
    return lines


def _fits(version: str, wanted: str | None) -> bool | None:
    if not wanted:
        return None if wanted is None else True
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:
        return None
    return SpecifierSet(wanted).contains(version, prereleases=True)


def mmcv_ops() -> str | None:
    """Say what stands for mmcv's compiled operators.

    Returns:
        str or None: 'compiled', 'stand-in' where mmzero puts one into their place, None without mmcv.
    """
    spec = find('mmcv')
    if spec is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    return 'compiled' if any(next(folder.glob('_ext*.*'), None) for folder in folders) else 'stand-in'
