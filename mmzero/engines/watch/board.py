"""Where the ranks of one host are, in memory that they share.

[Note: the board]
gloo aborts the process where collectives of different sizes meet, and exchanges wrong tensors where sizes are equal;
NCCL waits. So a rank looks at the others of its host before it communicates: the first to come to a point of the order
cannot know, the second sees that the other is at another place, and raises an error instead. Each rank writes into a
file of its own, mapped into memory, which costs no system call; the files have no name any more once all have opened
them. What was written stays readable when its process has died.
"""

import mmap
import os
import struct
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PLACE_BYTES, SLOTS = 248, 512
HEAD_BYTES = 256
_COUNT = struct.Struct('<Q')
_SLOT_BYTES = _COUNT.size + PLACE_BYTES
SIZE = HEAD_BYTES + SLOTS * _SLOT_BYTES
# Another processor may see the parts of a slot in another order.
SECOND_LOOK_SECONDS = 0.05


class Page:
    """The places of one rank: a ring of the last :data:`SLOTS`, and what it does.

    Args:
        path (Path or str, optional): The file. Defaults to None: memory that no other process sees.
        create (bool): Whether to make it. Defaults to False.

    Raises:
        OSError: If it is not there, as on another host, or there is no room for it.
    """

    def __init__(self, path: Path | str | None = None, create: bool = False) -> None:
        if path is None:
            self._map = mmap.mmap(-1, SIZE)
            return
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        file = os.open(path, flags, 0o600)
        try:
            if create:
                # Else a write would meet a full disk, and end the process.
                os.posix_fallocate(file, 0, SIZE)
            self._map = mmap.mmap(file, SIZE)
        finally:
            os.close(file)

    def write(self, index: int, place: bytes) -> None:
        """Note a place.

        Args:
            index (int): The point of the order, from 0.
            place (bytes): From :func:`as_place`.
        """
        start = _start(index)
        self._map[start + _COUNT.size : start + _SLOT_BYTES] = place
        # Last, so that it is never seen with another place.
        self._map[start : start + _COUNT.size] = _COUNT.pack(index + 1)

    def read(self, index: int) -> bytes | None:
        """The place at a point of the order; None: not there yet, or not kept.

        Args:
            index (int): The point of the order.

        Returns:
            bytes or None: The place.
        """
        start = _start(index)
        if self._map[start : start + _COUNT.size] != _COUNT.pack(index + 1):
            return None
        return self._map[start + _COUNT.size : start + _SLOT_BYTES]

    def note(self, doing: str) -> None:
        """Note what this rank does.

        Args:
            doing (str): Such as 'in train_step 12'.
        """
        self._map[:HEAD_BYTES] = doing.encode()[: HEAD_BYTES - 1].ljust(HEAD_BYTES, b'\0')

    def last(self) -> tuple[str, str]:
        """The last place, and what the rank does.

        Returns:
            tuple[str, str]: Both; empty where there is none.
        """
        counts = [(_COUNT.unpack_from(self._map, _start(slot))[0], slot) for slot in range(SLOTS)]
        count, _ = max(counts)
        place = self.read(count - 1) if count else None
        return '' if place is None else as_text(place), as_text(self._map[:HEAD_BYTES])


class Board:
    """This rank's page, and those of the ranks of its host.

    Args:
        rank (int): This rank.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        folder = '/dev/shm' if os.path.isdir('/dev/shm') else tempfile.gettempdir()
        self.path = Path(folder, f'mmzero-{os.getpid()}-{time.monotonic_ns()}')
        try:
            self.own = Page(self.path, create=True)
        except OSError:
            # Waiting still shows what the board would have.
            self.remove_file()
            self.own = Page()
        self.others: dict[int, Page] = {}

    def open(self, paths: list[str]) -> None:
        """Open the other ranks' pages; what is on another host is left out.

        Args:
            paths (list[str]): Of all ranks.
        """
        for rank, path in enumerate(paths):
            if rank != self.rank:
                with suppress(OSError):
                    self.others[rank] = Page(path)

    @property
    def pages(self) -> dict[int, Page]:
        """All that can be seen from here, by rank."""
        return {self.rank: self.own, **self.others}

    def remove_file(self) -> None:
        """Take the file's name away, once all have opened it; memory stays."""
        self.path.unlink(missing_ok=True)

    def come_to(self, index: int, place: str) -> tuple[int, str] | None:
        """Write down a place, and compare it with that of the other ranks.

        Args:
            index (int): The point of the order.
            place (str): The place.

        Returns:
            tuple[int, str] or None: A rank that is at another place at the same point, and where.
        """
        mine = as_place(place)
        self.own.write(index, mine)
        for rank, page in self.others.items():
            theirs = page.read(index)
            if theirs is not None and theirs != mine:
                time.sleep(SECOND_LOOK_SECONDS)
                theirs = page.read(index)
                if theirs is not None and theirs != mine:
                    return rank, as_text(theirs)
        return None


def as_place(text: str) -> bytes:
    """Encode a place; the end of a long one is kept, which holds its name.

    Args:
        text (str): The place.

    Returns:
        bytes: :data:`PLACE_BYTES` of them.
    """
    return text.encode()[-PLACE_BYTES:].ljust(PLACE_BYTES, b'\0')


def as_text(place: bytes) -> str:
    """The counterpart of :func:`as_place`.

    Args:
        place (bytes): Encoded.

    Returns:
        str: The text.
    """
    return place.rstrip(b'\0').decode(errors='replace')


def _start(index: int) -> int:
    return HEAD_BYTES + index % SLOTS * _SLOT_BYTES
