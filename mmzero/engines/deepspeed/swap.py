"""The folder of a rank's swap files on the NVMe disk, which goes when the process does.

[Note: swap files]
DeepSpeed leaves its swap files where they are, several times the size of the model. So each process has a folder of its
own, with a file in it that it holds locked. The folder is removed when the process ends, by SIGTERM too. A process that
is killed leaves it; the next one that starts on the same disk removes every folder that nobody holds.
"""

import fcntl
import os
import shutil
import signal
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path
from typing import IO, Any

from mmzero.errors import ConfigError

PREFIX = 'mmzero_swap_'
_HELD = 'held'


class SwapFolder:
    """A folder for this process.

    Args:
        root (str): The folder on the disk.

    Raises:
        ConfigError: If it cannot be written into.
    """

    def __init__(self, root: str) -> None:
        try:
            os.makedirs(root, exist_ok=True)
            _remove_left(Path(root))
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        except OSError as error:
            why = f'{error.strerror}; give a folder on a local disk that can be written into'
            raise ConfigError([f'model_wrapper_cfg.offload.nvme_path: got {root!r}; {why}']) from error
        self._held: IO[str] | None = _hold(self.path)
        # As atexit, and at the end of a process that multiprocessing has started.
        Finalize(None, self.remove, exitpriority=0)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            # Whoever has a handler of their own ends the process in an ordinary way, or does not end it.
            signal.signal(signal.SIGTERM, self._end)

    def remove(self) -> None:
        """Remove the folder; again is no fault."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._held is not None:
            self._held.close()
            self._held = None

    def _end(self, number: int, frame: Any) -> None:
        self.remove()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _hold(folder: Path) -> IO[str] | None:
    """Lock a folder's file; None where another process holds it."""
    file = (folder / _HELD).open('w')
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def _remove_left(root: Path) -> None:
    for folder in root.glob(f'{PREFIX}*'):
        # Without the file it is being made, or being removed.
        if (folder / _HELD).exists() and (held := _hold(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            held.close()
