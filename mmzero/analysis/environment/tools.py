"""Compilers, and what MMEngine's own report says."""

import ctypes.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

from .children import told_by_python
from .packages import find

# What of MMEngine's report this one says itself, or nobody reads.
_LEFT_OUT = ('numpy_random_seed', 'PyTorch compiling details', 'sys.platform', 'PyTorch', 'MMEngine')


def probe_compilers() -> dict[str, Any]:
    """Find what torch.compile and DeepSpeed build with.

    Returns:
        dict[str, Any]: Paths of the programs, None where they are missing, and whether headers are there.
    """
    include = sysconfig.get_paths().get('include') or ''
    return dict(
        cxx=_first(os.environ.get('CXX'), 'g++', 'clang++'),
        cc=_first(os.environ.get('CC'), 'gcc', 'clang'),
        ninja=_first('ninja'),
        nvcc=_first(
            'nvcc', *(f'{os.environ[name]}/bin/nvcc' for name in ('CUDA_HOME', 'CUDA_PATH') if name in os.environ)
        ),
        python_headers=Path(include, 'Python.h').is_file(),
        libaio=ctypes.util.find_library('aio'),
        libaio_headers=any(Path(folder, 'libaio.h').is_file() for folder in _include_folders()),
    )


def _first(*names: str | None) -> str | None:
    # CXX may hold options, too.
    return next((found for name in names if name and (found := shutil.which(name.split()[0]))), None)


def _include_folders() -> list[str]:
    given = [os.environ.get('CPATH', ''), os.environ.get('C_INCLUDE_PATH', '')]
    return ['/usr/include', '/usr/local/include', *(folder for text in given for folder in text.split(':') if folder)]


_COLLECT = """
import json
from mmengine.utils.dl_utils import collect_env
print(json.dumps({name: str(value) for name, value in collect_env().items()}))
"""


def probe_mmengine() -> dict[str, Any]:
    """Ask MMEngine's collect_env, in a process of its own, since it initialises CUDA and imports OpenCV.

    Returns:
        dict[str, Any]: What it says besides this report; empty without MMEngine.
    """
    if find('mmengine') is None or find('torch') is None:
        return {}
    return {name: value for name, value in told_by_python(_COLLECT).items() if name not in _LEFT_OUT}
