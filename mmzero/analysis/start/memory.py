"""What processes hold, as seen from outside."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

PAUSE_SECONDS = 0.002


def private_bytes(pid: int) -> int:
    """Memory of a process that belongs to it alone, and that the kernel cannot drop: not mapped files.

    Args:
        pid (int): The process.

    Returns:
        int: ``RssAnon`` of proc(5); 0 once the process has ended.
    """
    try:
        lines = Path(f'/proc/{pid}/status').read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith('RssAnon:'))


class PeakOf:
    """Watches processes, every few milliseconds, for as long as it is entered.

    Args:
        pids (Sequence[int]): The processes.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._before = [private_bytes(pid) for pid in pids]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.bytes = 0
        """The most that all of them together have held beyond what they held at first."""
        self.samples = 0
        """How often that was looked at."""

    def __enter__(self) -> 'PeakOf':
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.is_set():
            now = sum(private_bytes(pid) for pid in self._pids)
            self.bytes = max(self.bytes, now - sum(self._before))
            self.samples += 1
            time.sleep(PAUSE_SECONDS)
