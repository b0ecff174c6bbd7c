"""The trail of this rank: what it does together with the others, one after the other."""

from collections import deque

from mmzero.engines.watch.board import Board
from mmzero.errors import RanksPartedError

KEPT = 256


class Trail:
    """The last places that this rank has come to, and what it does between them.

    All ranks of a right program come to the same places in the same order, since there they communicate. The main
    thread, and autograd's, write; the watch reads.
    """

    def __init__(self) -> None:
        self.doing = 'before its first step'
        self._notes = 0
        self.start_on(None)

    def start_on(self, board: Board | None) -> None:
        """Start a new order.

        Args:
            board (Board, optional): Where ranks of one host compare places as they come to them.
        """
        self.count = 0
        self._last: deque[str] = deque(maxlen=KEPT)
        self._board = board

    def come_to(self, place: str) -> None:
        """Note a place at which all ranks communicate.

        Args:
            place (str): Such as 'the forward of the unit backbone.layers.1'.

        Raises:
            RanksPartedError: If another rank of this host has come to another one in its stead.
        """
        self._last.append(place)
        self.count += 1
        if self._board is not None:
            other = self._board.come_to(self.count - 1, place)
            if other is not None:
                raise RanksPartedError(self._apart(self._board, place, *other))

    def _apart(self, board: Board, place: str, rank: int, theirs: str) -> str:
        doing = board.pages[rank].last()[1]
        return (
            f'ranks have parted ways: rank {board.rank} has come to {place}, {self.doing}, and rank {rank} to '
            f'{theirs}, {doing}. {WHAT_TO_DO}'
        )

    def note(self, doing: str) -> None:
        """Note what this rank does, which need not be the same on all ranks.

        Args:
            doing (str): Such as 'in train_step 12'.
        """
        self.doing = doing
        self._notes += 1
        if self._board is not None:
            self._board.own.note(doing)

    def moves(self) -> tuple[int, int]:
        """What changes whenever this rank comes to another place or does something else.

        Returns:
            tuple[int, int]: Two counters.
        """
        return self.count, self._notes

    def last(self) -> list[str]:
        """The last places, the newest at the end.

        Returns:
            list[str]: At most :data:`KEPT`.
        """
        while True:
            try:
                return list(self._last)
            except RuntimeError:
                # Another thread has come to a place meanwhile.
                continue


WHAT_TO_DO = (
    'All ranks have to run the same units in the same order, as many steps, and to save and to load together: look for '
    'what depends on the rank or on its data (a branch, a loop of another length, if is_main_process()). A module that '
    'not every rank runs is left out of wrap_policy, so that its parameters stay in a unit that every rank runs, with '
    'find_unused_parameters=True. Nor may it depend on the rank which units backward comes to'
)

TRAIL = Trail()
"""For the life of the process, as a rank is in one place at a time."""
