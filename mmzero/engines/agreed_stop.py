"""Stopping at one iteration on all ranks, where a signal comes to some of them, at other times.

[Note: the iteration at which ranks stop]
A rank that is told to stop writes a later iteration to the store, the first one wins, and all ranks look there every so
many iterations, a multiple of those of an optimizer step. Such a step waits for all ranks, so that no rank is further
ahead of another than one of them: what is written two looks ahead every rank sees in time. A look is one message to the
store and its answer.
"""

import math

from mmzero._compat import default_store

_KEY = 'mmzero/stop'


class AgreedStop:
    """One agreement.

    Args:
        every (int): Iterations between two looks, 2 or more.
        multiple_of (int): Of which the iteration is a multiple: the micro-batches of an optimizer step. Defaults to 1.
    """

    _made = 0

    def __init__(self, every: int, multiple_of: int = 1) -> None:
        # Alike on all ranks, and new for each run of a process.
        AgreedStop._made += 1
        self._key = f'{_KEY}/{AgreedStop._made}'
        self.every = math.lcm(every, multiple_of)
        self._has_asked = False

    def ask(self, done: int) -> None:
        """Ask all ranks to stop; only once.

        Args:
            done (int): Iterations that this rank has done.
        """
        if not self._has_asked:
            self._has_asked = True
            default_store().compare_set(self._key, '', str((done // self.every + 2) * self.every))

    def is_now(self, done: int) -> bool:
        """Say whether all ranks stop here. Every rank asks after each iteration.

        Args:
            done (int): Iterations that this rank has done.

        Returns:
            bool: The same on every rank.
        """
        store = default_store()
        return done % self.every == 0 and store.check([self._key]) and done >= int(store.get(self._key))
