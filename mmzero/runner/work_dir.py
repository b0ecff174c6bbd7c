"""The folder of a run: made, and written into, by any rank and without a process group."""

from pathlib import Path

import torch.distributed as dist

from mmzero.checkpoint import made_in
from mmzero.errors import ConfigError


def make_work_dir(folder: str) -> None:
    """Make it before Runner does; permissions do not tell a file system that refuses all the same.

    Args:
        folder (str): The folder.

    Raises:
        ConfigError: If it cannot be written into.
    """
    try:
        made_in(folder).rmdir()
    except OSError as error:
        fault = f'work_dir: {folder} cannot be written ({error.strerror}); name a folder that can be made'
        raise ConfigError([fault]) from error


def write_traceback(text: str, folder: str) -> str | None:
    """Keep a traceback that is not shown, in a file of this rank's.

    Args:
        text (str): The traceback.
        folder (str): Where.

    Returns:
        str, optional: The file; None where it cannot be written.
    """
    path = Path(folder) / f'traceback_rank{dist.get_rank() if dist.is_initialized() else 0}.txt'
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError:
        return None
    return str(path)
