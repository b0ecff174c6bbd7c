"""The errors that mmzero raises on purpose: each says where, what it got, what is allowed and what to do."""

import difflib
from collections.abc import Iterable, Sequence


class ZeroError(ValueError):
    """Base of every error that a user can mend; tools print it without a traceback."""


class ConfigError(ZeroError):
    """Faults of a config, all of them at once.

    Args:
        faults (Sequence[str]): One line per fault, each starting with the config path it is about.
    """

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        noun = 'fault' if len(self.faults) == 1 else 'faults'
        lines = ''.join(f'\n  {fault}' for fault in self.faults)
        super().__init__(f'{len(self.faults)} {noun} in the config:{lines}')

    def __reduce__(self) -> tuple:
        # Exceptions are pickled by their message; ranks send each other this one.
        return type(self), (self.faults,)


class PlanError(ZeroError):
    """A wrap plan that does not fit the model."""


class CompileError(ZeroError):
    """A unit that torch.compile cannot compile."""


class NonFiniteError(ZeroError):
    """Gradients that are not finite, step after step."""


class RanksPartedError(ZeroError):
    """Ranks that have come to different places, and would wait for each other."""


class OfAnotherRank(Exception):
    """Marks what a rank raises because another one has failed, which says itself why."""


class OtherRankError(OfAnotherRank, RuntimeError):
    """Another rank has failed."""


class OtherRankZeroError(OfAnotherRank, ZeroError):
    """Another rank has failed with what a user can mend."""


class CheckpointError(ZeroError):
    """A checkpoint that is missing, damaged, or does not fit the model."""


class DataError(ZeroError):
    """A data set that cannot be read."""


def near_names(name: str, known: Iterable[str]) -> str:
    """Say which known names are close to a wrong one.

    Args:
        name (str): The name that was not found.
        known (Iterable[str]): The names that exist.

    Returns:
        str: ``"; did you mean 'a' or 'b'?"``, or the list of known names where none is close.
    """
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if close:
        return '; did you mean ' + ' or '.join(repr(item) for item in close) + '?'
    shown = ', '.join(names[:12]) + (', ...' if len(names) > 12 else '')
    return f'; known are: {shown}' if names else ''


PREEMPTED = 85
"""The exit code of a run that has saved and asks to be started again (ERESTART of Linux)."""


class Preempted(SystemExit):
    """A scheduler has asked the run to end, and it has saved.

    Args:
        rank (int): Rank 0 leaves with the code 85, the others with 0, so that a launcher ends none of them before.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(PREEMPTED if rank == 0 else 0)
