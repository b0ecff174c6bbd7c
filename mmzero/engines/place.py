"""Where each rank is: a word that it leaves at the store, for those that wait for it.

Cost: one message without an answer for each word.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch.distributed as dist

from mmzero._compat import default_store, group_timeout
from mmzero.errors import OtherRankError, OtherRankZeroError

LONGEST_PAUSE_SECONDS = 0.05


@dataclass
class Place:
    """Where a rank is.

    For the life of the process, so that keys in the store are new also to the next process group.

    Args:
        steps (int): Steps that it has started. Defaults to 0.
        meetings (int): Meetings that it has come to. Defaults to 0.
        state (str): 'goes'; 'waits' at the next meeting; 'ends' the innermost loop, of which it has no more steps of
            its own; 'failed', or 'refused' where a user can mend it. Defaults to 'goes'.
        loops (list[int]): Loops that it is in, innermost last. Defaults to none.
        what (str): What it does, for errors. Defaults to ''.
    """

    steps: int = 0
    meetings: int = 0
    state: str = 'goes'
    loops: list[int] = field(default_factory=list)
    what: str = ''

    def leave_word(self, state: str, what: str) -> None:
        """Say where this rank is.

        Args:
            state (str): The state that it is in from here.
            what (str): What it does.
        """
        self.state, self.what = state, what
        loops = ','.join(map(str, self.loops))
        default_store().set(_key(dist.get_rank()), f'{self.steps} {self.meetings} {state} {loops} {what}')


here = Place()
"""This rank's."""


def alone() -> bool:
    """Whether there is no other rank."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def places(ranks: Iterable[int]) -> dict[int, Place]:
    """Read where other ranks are.

    Args:
        ranks (Iterable[int]): The ranks.

    Returns:
        dict[int, Place]: By rank; without those that have left no word yet.
    """
    store, keys = default_store(), {rank: _key(rank) for rank in ranks}
    if keys and not store.check(list(keys.values())):
        keys = {rank: key for rank, key in keys.items() if store.check([key])}
    # One message for all of them; it would wait for a key that is missing.
    words = store.multi_get(list(keys.values())) if keys else []
    return {rank: _read(word) for rank, word in zip(keys, words, strict=True)}


def raise_of_failed(found: dict[int, Place]) -> None:
    """Raise the error of another rank.

    Args:
        found (dict[int, Place]): Where other ranks are.

    Raises:
        OtherRankZeroError: If a rank has failed with what a user can mend.
        OtherRankError: If a rank has failed otherwise.
    """
    for rank, place in found.items():
        if place.state in ('failed', 'refused'):
            kind = OtherRankError if place.state == 'failed' else OtherRankZeroError
            raise kind(f'rank {rank} failed with {place.what}')


def looks() -> Iterator[None]:
    """Look at the store again and again, more and more rarely.

    Yields:
        None: Until the process group's timeout has passed.
    """
    start, pause = time.monotonic(), 0.001
    while time.monotonic() - start < group_timeout().total_seconds():
        yield
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _key(rank: int) -> str:
    return f'mmzero/place/{rank}'


def _read(word: bytes) -> Place:
    steps, meetings, state, loops, what = word.decode().split(' ', 4)
    return Place(int(steps), int(meetings), state, [int(loop) for loop in loops.split(',') if loop], what)
