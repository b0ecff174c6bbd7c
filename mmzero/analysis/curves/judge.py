"""Where a training in 16 bit ends, beside those of stock DDP in float32."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from mmzero.analysis.curves.config import REFERENCE
from mmzero.analysis.curves.run import Losses
from mmzero.errors import DataError

TAIL = 50
"""Steps at the end whose mean loss is compared."""
TOLERANCE = 0.02
"""How far from the references' mean an end outside of their range may lie."""


@dataclass(frozen=True)
class Verdict:
    """Trainings in one dtype beside the references.

    [Note: one training is a draw]
    Rounding alone parts two trainings of the same seed as far as another seed does: a matching that flips once changes
    all that follows. Of four draws from one distribution the last lies out of the range of the others every second
    time, so that a verdict on one training tells little, and one on the mean over several seeds more.

    Args:
        dtype (str): Their dtype.
        seeds (tuple[int, ...]): Their seeds.
        end (float): Their mean loss over the last steps.
        low (float): The least of the references' ends.
        high (float): The greatest of them.
        mean (float): Their mean.
    """

    dtype: str
    seeds: tuple[int, ...]
    end: float
    low: float
    high: float
    mean: float

    @property
    def apart(self) -> float:
        """Relative distance from the references' mean."""
        return self.end / self.mean - 1

    @property
    def holds(self) -> bool:
        """Whether the end lies in the range of the references, or near their mean. False for nan."""
        return self.low <= self.end <= self.high or abs(self.apart) <= TOLERANCE


def end_of(losses: Losses, tail: int = TAIL) -> float:
    """The mean loss of the last steps.

    Args:
        losses (Losses): A training.
        tail (int): How many steps. Defaults to TAIL.

    Returns:
        float: The mean.
    """
    return fmean(losses.losses[-tail:])


def judge(found: Sequence[Losses], tail: int = TAIL) -> list[Verdict]:
    """Hold the trainings in each dtype of 16 bit against the references.

    Args:
        found (Sequence[Losses]): All trainings, as :func:`mmzero.analysis.curves.train_all` gives them.
        tail (int): Steps at the end to compare. Defaults to TAIL.

    Returns:
        list[Verdict]: Of each dtype.

    Raises:
        DataError: If there is no reference, or trainings are of different or too few steps.
    """
    steps = {str(losses.curve): len(losses.losses) for losses in found}
    if len(set(steps.values())) > 1 or min(steps.values(), default=0) < tail:
        raise DataError(f'curves are compared over the same steps, {tail} or more; got {steps}')
    ends: dict[str, dict[int, float]] = {}
    for losses in found:
        ends.setdefault(losses.curve.dtype, {})[losses.curve.seed] = end_of(losses, tail)
    references = list(ends.pop(REFERENCE, {}).values())
    if not references:
        raise DataError('curves are compared with stock DDP in float32; there is none')
    low, high, mean = min(references), max(references), fmean(references)
    return [Verdict(dtype, tuple(own), fmean(own.values()), low, high, mean) for dtype, own in ends.items()]
