"""Compiled operators: mmcv's and DeepSpeed's, which are built, which could be, and builds that were cut off."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

from .children import told_by_python
from .packages import find, mmcv_ops

# Only asks; builds nothing.
_ASK = """
import json
from deepspeed.ops.op_builder.all_ops import ALL_OPS
from deepspeed.git_version_info import installed_ops
def can(builder):
    try:
        return bool(builder.is_compatible(verbose=False))
    except Exception:
        return False
ops = {name: op for name, op in ALL_OPS.items() if 'not_implemented' not in name}
print(json.dumps({name: dict(installed=bool(installed_ops.get(name)), compatible=can(op)) for name, op in ops.items()}))
"""


def probe_builds() -> dict[str, Any]:
    """Look at what is compiled.

    Returns:
        dict[str, Any]: ``mmcv``, see :func:`mmcv_ops`; ``root``, where torch builds extensions; ``locks``, what builds
        left behind there, and how many minutes ago.
    """
    root = extensions_root()
    return dict(mmcv=mmcv_ops(), root=str(root), locks=locks_of(root))


def probe_deepspeed() -> dict[str, Any]:
    """Ask DeepSpeed for its operators, in a process of its own.

    Returns:
        dict[str, Any]: By name 'installed', 'built', 'compatible' or 'missing'; empty without DeepSpeed.
    """
    if find('deepspeed') is None or find('torch') is None:
        return {}
    root = extensions_root()
    device = 'cuda' if shutil.which('nvidia-smi') else 'cpu'
    told = told_by_python(_ASK, DS_ACCELERATOR=os.environ.get('DS_ACCELERATOR', device))
    built = {file.stem for file in root.glob('*/*/*.so')} | {file.stem for file in root.glob('*/*.so')}
    return {name: _state(name, one, built) for name, one in told.items()}


def _state(name: str, told: dict[str, bool], built: set[str]) -> str:
    if told['installed']:
        return 'installed'
    if name in built:
        return 'built'
    return 'compatible' if told['compatible'] else 'missing'


def extensions_root() -> Path:
    """Where torch builds extensions.

    Returns:
        Path: The folder; it need not exist.
    """
    given = os.environ.get('TORCH_EXTENSIONS_DIR')
    return Path(given) if given else Path.home() / '.cache/torch_extensions'


def locks_of(root: Path) -> list[dict[str, Any]]:
    """Find locks of builds: one that was killed leaves it, and every later start waits for it.

    Args:
        root (Path): Where torch builds extensions.

    Returns:
        list[dict[str, Any]]: ``path`` and ``minutes`` since.
    """
    files = [*root.glob('*/lock'), *root.glob('*/*/lock')]
    return [dict(path=str(file), minutes=int((time.time() - file.stat().st_mtime) / 60)) for file in files]
