"""The trainings of one config: each is run once, in whatever order they are asked for."""

import math
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmzero.analysis.sweep.comparison import distances, largest
from mmzero.analysis.sweep.ranks import Limits, run_ranks
from mmzero.analysis.sweep.training import Record, Way

RANKS = 2
PLAIN = Way('none', 'equal')

WHATEVER_THE_SIZE = ('in build\n', 'in read\n', 'MissingOpError')
"""In a traceback: the config cannot be read, the model not built, or an operator is not installed."""

OUT_OF_MEMORY = ("can't allocate memory", 'MemoryError')


@dataclass(frozen=True)
class Failure:
    """Why a training did not end.

    Args:
        reason (str): The error in a line.
        trace (str): Tracebacks of the ranks, and the ends of their logs.
    """

    reason: str
    trace: str

    @property
    def is_memory(self) -> bool:
        """Whether a rank came to its memory limit."""
        return any(word in self.reason for word in OUT_OF_MEMORY)


class Trials:
    """Trains one config in processes of its own. Close it, to remove its files.

    Args:
        config (str): A path, or a name such as ``mmdet::dino/...py``.
        limits (Limits): What a rank may use.
        sizes (Sequence[int]): Sides of the images to try, in pixels.
    """

    def __init__(self, config: str, limits: Limits, sizes: Sequence[int]) -> None:
        self.config, self.limits, self.sizes = config, limits, sizes
        self.size = sizes[0]
        self.seconds = 0.0
        self.folder = Path(tempfile.mkdtemp(prefix='sweep-'))
        self._done: dict[Way, list[dict[str, Any]]] = {}
        self._failed: dict[Way, Failure] = {}

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def train_plainly(self) -> Failure | None:
        """Train the plain model, on the first size on which it trains.

        Returns:
            Failure, optional: Of the last size that was tried; None where it trains, with numbers that are finite.
        """
        for size in self.sizes if PLAIN not in self._done else ():
            self.size = size
            self._failed.pop(PLAIN, None)
            self.train(PLAIN)
            failure = self.failure(PLAIN)
            if failure is None or failure.is_memory or any(word in failure.trace for word in WHATEVER_THE_SIZE):
                break
        return self.failure(PLAIN) or _not_finite(self.first(PLAIN))

    def train(self, *ways: Way) -> None:
        """Train in several ways, in the same processes as long as nothing fails, unless that was done before.

        Where a reference fails the others are still trained; where the pair does, what comes after it is not.

        Args:
            *ways (Way): All with a process group, or all without.
        """
        left = [way for way in ways if way not in self._done and way not in self._failed]
        while left:
            world_size = RANKS if left[0].wrapper != 'none' else 1
            outcome = run_ranks(self.config, self.size, left, world_size, self.folder, self.limits)
            self._done.update(outcome.done)
            self.seconds += sum(outcome.seconds.values())
            if outcome.failed is not None:
                self._failed[outcome.failed] = Failure(f'{outcome.failed}: {outcome.reason}', outcome.trace)
                if outcome.failed.wrapper == 'zero':
                    break
            left = [way for way in left if way not in self._done and way not in self._failed]

    def failure(self, way: Way) -> Failure | None:
        """Say why a training failed.

        Args:
            way (Way): One that was trained.

        Returns:
            Failure, optional: None where it did not.
        """
        return self._failed.get(way)

    def first(self, way: Way) -> dict[str, Any]:
        """What rank 0 returned.

        Args:
            way (Way): One that was trained and did not fail.

        Returns:
            dict[str, Any]: Losses, norms, and the numbers of parameters and units.
        """
        return self._done[way][0]

    def distances(self, ours: Way, theirs: Way) -> dict[str, float]:
        """Measure how far a training is from another one, trained first where they are not.

        Args:
            ours (Way): A training.
            theirs (Way): The one to measure from; the plain model is compared with every rank.

        Returns:
            dict[str, float]: The largest over the ranks; of weights, rank 0's, which has them whole.

        Raises:
            ValueError: If one of them failed, or they cannot be compared.
        """
        self.train(ours)
        self.train(theirs)
        found, reference = self._records(ours), self._records(theirs)
        if len(reference) < len(found):
            reference *= len(found)
        apart = [distances(*pair) for pair in zip(found, reference, strict=True)]
        return {what: largest(values[what] for values in apart if what in values) for what in apart[0]}

    def _records(self, way: Way) -> list[Record]:
        if way in self._failed:
            raise ValueError(self._failed[way].reason)
        records = [Record(losses=rank['losses'], norms=rank['norms']) for rank in self._done[way]]
        weights = self.folder / str(way)
        if weights.exists():
            records[0] = Record(**torch.load(weights, mmap=True))
        return records


def _not_finite(result: dict[str, Any]) -> Failure | None:
    losses, norms = result['losses'], result['norms']
    if all(map(math.isfinite, [*losses, *norms])):
        return None
    return Failure(f'{PLAIN}: losses {losses} and gradient norms {norms}', '')
