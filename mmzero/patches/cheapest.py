"""The cheapest set of modules to recompute so that what is kept fits (``type='Budget'``)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

STEPS = 2**14
"""In which memory is counted, at most: what a module keeps is overrated by up to one of them."""


@dataclass(frozen=True)
class Measured:
    """What one module takes, on the rank where it takes most.

    Args:
        name (str): Its path.
        inputs (int): Bytes that stay if it is recomputed: its inputs, as far as no other module has them too.
        kept (int): Bytes that stay if it is not.
        at_once (int): Bytes of one recompute while backward passes it; less than ``kept`` where it runs twice.
        seconds (float): Of its forward.
        largest (int): Bytes of all that one call got.
    """

    name: str
    inputs: int
    kept: int
    at_once: int
    seconds: float
    largest: int = 0


@dataclass(frozen=True)
class Choice:
    """Which modules are recomputed.

    Args:
        recomputed (frozenset[str]): Their paths.
        peak (int): Bytes kept for backward at the worst moment, with those of a recompute that is under way.
        seconds (float): Of all recomputes in one backward.
    """

    recomputed: frozenset[str]
    peak: int
    seconds: float


def peak_of(modules: Sequence[Measured], other: int, recomputed: frozenset[str]) -> int:
    """Say what is kept for backward at the worst moment.

    Backward comes to the last module first. When it recomputes one, what later ones have kept is gone.

    Args:
        modules (Sequence[Measured]): In the order of forward.
        other (int): Bytes that are kept outside of them.
        recomputed (frozenset[str]): Paths of those that are recomputed.

    Returns:
        int: Bytes.
    """
    now = worst = other
    for module in modules:
        now += module.inputs if module.name in recomputed else module.kept
        worst = max(worst, now + (module.at_once if module.name in recomputed else 0))
    return worst


def choice_of(modules: Sequence[Measured], other: int, recomputed: frozenset[str]) -> Choice:
    """Say what recomputing some modules takes.

    Args:
        modules (Sequence[Measured]): In the order of forward.
        other (int): Bytes that are kept outside of them.
        recomputed (frozenset[str]): Paths of those that are recomputed.

    Returns:
        Choice: The choice, with its peak and its time.
    """
    seconds = sum(module.seconds for module in modules if module.name in recomputed)
    return Choice(recomputed, peak_of(modules, other, recomputed), seconds)


def cheapest(modules: Sequence[Measured], other: int, memory: int) -> Choice | None:
    """Choose what to recompute so that the peak stays within the memory, at the least time.

    A knapsack over the modules in the order of forward, in :data:`STEPS` steps of memory, rounded up.

    Args:
        modules (Sequence[Measured]): In the order of forward.
        other (int): Bytes that are kept outside of them.
        memory (int): Bytes that may be kept.

    Returns:
        Choice, optional: The choice; None where nothing fits, with all recomputed.
    """
    # A frozen module keeps less than its inputs, and is never recomputed.
    least = [min(module.inputs, module.kept) for module in modules]
    room = memory - other - sum(least)
    if room < 0:
        return None
    steps = min(STEPS, room)
    step = room / max(steps, 1) or 1.0
    # Seconds that are saved at most, by the bytes which modules keep more than the least so far.
    saved = np.full(steps + 1, -np.inf)
    saved[0] = 0.0
    keeps = np.zeros((len(modules), steps + 1), dtype=bool)
    below = other
    for index, module in enumerate(modules):
        below += least[index]
        cost = int(np.ceil((module.kept - least[index]) / step))
        keeping = np.full(steps + 1, -np.inf)
        if cost <= steps:
            keeping[cost:] = saved[: steps + 1 - cost] + module.seconds
        recomputing = saved.copy()
        # Beyond these steps its recompute would not fit beside what modules before it have kept.
        recomputing[max(int((memory - below - module.at_once) // step) + 1, 0) :] = -np.inf
        keeps[index] = keeping >= recomputing
        saved = np.maximum(keeping, recomputing)
    if np.isneginf(saved.max()):
        return None
    return choice_of(modules, other, _trace(modules, keeps, int(saved.argmax()), step))


def _trace(modules: Sequence[Measured], keeps: np.ndarray, at: int, step: float) -> frozenset[str]:
    recomputed = set()
    for index in reversed(range(len(modules))):
        module = modules[index]
        if keeps[index, at]:
            at -= int(np.ceil(max(module.kept - module.inputs, 0) / step))
        else:
            recomputed.add(module.name)
    return frozenset(recomputed)
