"""Locks that builds of DeepSpeed's operators have left behind.

A build that is killed leaves a file ``lock`` in its folder of torch's extensions, on which every later start waits for
ever, without a word. One that is going on holds the file open.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch.utils.cpp_extension

from mmzero.errors import ConfigError


def check_build_locks(operators: Iterable[str]) -> None:
    """Refuse to wait for builds that nobody runs.

    Args:
        operators (Iterable[str]): Names of the operators that will be loaded, as 'async_io'.

    Raises:
        ConfigError: If there is a lock that no process of this machine is seen to hold; it lists all of them.
    """
    left = [lock for name in operators if (lock := _folder(name) / 'lock').exists() and not _is_held(lock)]
    if left:
        raise ConfigError(
            [
                f'{lock}: is left of a build of DeepSpeed that was killed, and every start would wait for it for ever; '
                'where no other machine builds there now, remove the file'
                for lock in left
            ]
        )


def _folder(operator: str) -> Path:
    root = os.environ.get('TORCH_EXTENSIONS_DIR')
    if root is not None:
        return Path(root) / operator
    version = torch.version.cuda
    python = f'py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, "abiflags", "")}'
    build = 'cpu' if version is None else f'cu{version.replace(".", "")}'
    return Path(torch.utils.cpp_extension.get_default_build_root()) / f'{python}_{build}' / operator


def _is_held(lock: Path) -> bool:
    """Whether a process of this machine has it open, of those whose files this one may see."""
    return any(_opens(process, lock) for process in _processes())


def _processes() -> Iterator[Path]:
    return (path for path in Path('/proc').iterdir() if path.name.isdigit())


def _opens(process: Path, lock: Path) -> bool:
    try:
        return any(os.path.samefile(link, lock) for link in (process / 'fd').iterdir() if link.exists())
    except OSError:
        # It has ended, or is another user's.
        return False
