"""What torch.compile does on this rank."""

import time
from typing import Any

from mmzero._compat import watch_compiles


class Compiling:
    """Notes each compilation: whether one is under way, how many there were and how long they took.

    A rank that compiles waits for nobody, also where its main thread stays where it is, as for a pool of compilers.

    Attributes:
        active (bool): Whether something is compiled now.
        count (int): Functions that were compiled, and parts of those that a graph break has cut.
        again (int): How many of these were compiled before, for other inputs or another state of the model.
        seconds (float): How long all of it took.
    """

    def __init__(self) -> None:
        self.active = False
        self.count = self.again = 0
        self.seconds = 0.0
        self._since = 0.0

    def start(self) -> None:
        """Note compilations from now on."""
        watch_compiles(self._starts, self._ends)

    def _starts(self, what: Any) -> None:
        self.active, self._since = True, time.monotonic()
        # A backward belongs to the function that its forward was compiled with.
        if what.callback_trigger.name == 'DYNAMO':
            self.count += 1
            self.again += not what.compile_id.partition('/')[2].startswith('0')

    def _ends(self, what: Any) -> None:
        self.active = False
        self.seconds += time.monotonic() - self._since


COMPILING = Compiling()
"""For the life of the process, as the compiler is."""
