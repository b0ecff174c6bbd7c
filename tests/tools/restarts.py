"""What the config of a run under torchrun names."""

import os
import signal
from pathlib import Path
from typing import Any

from mmengine.hooks import Hook


class KillOnce(Hook):
    """Kills a rank, the first time that it has done some number of iterations."""

    def __init__(self, rank: int, after: int, note: str) -> None:
        self.rank, self.after, self.note = rank, after, Path(note)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if runner.rank == self.rank and runner.iter + 1 == self.after and not self.note.exists():
            self.note.write_text('')
            os.kill(os.getpid(), signal.SIGKILL)
