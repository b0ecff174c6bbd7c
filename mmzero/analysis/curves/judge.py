"""Where a training in 16 bit ends, beside those of stock DDP in float32."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from mmzero.analysis.curves.run import Losses
from mmzero.errors import DataError

TAIL = 50
"""Steps at the end whose mean loss is compared."""
TOLERANCE = 0.02
"""How far from the references' mean an end outside of their range may lie."""


@dataclass(frozen=True)
class Verdict:
    """A training beside the references.

    Args:
        losses (Losses): The training.
        end (float): Its mean loss over the last steps.
        low (float): The least of the references' ends.
        high (float): The greatest of them.
        mean (float): Their mean.
    """

    losses: Losses
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
    """Hold every training in 16 bit against the references.

    Args:
        found (Sequence[Losses]): All trainings, as :func:`mmzero.analysis.curves.train_all` gives them.
        tail (int): Steps at the end to compare. Defaults to TAIL.

    Returns:
        list[Verdict]: Of each training in 16 bit.

    Raises:
        DataError: If there is no reference, or trainings are of different or too few steps.
    """
    steps = {str(losses.curve): len(losses.losses) for losses in found}
    if len(set(steps.values())) > 1 or min(steps.values(), default=0) < tail:
        raise DataError(f'curves are compared over the same steps, {tail} or more; got {steps}')
    ends = [end_of(losses, tail) for losses in found if losses.curve.is_reference]
    if not ends:
        raise DataError('curves are compared with stock DDP in float32; there is none')
    return [
        Verdict(losses, end_of(losses, tail), min(ends), max(ends), fmean(ends))
        for losses in found
        if not losses.curve.is_reference
    ]
