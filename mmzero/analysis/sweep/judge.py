"""One config: what is trained, in which order, and what follows from it."""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from mmzero.analysis.sweep.comparison import beyond, distances
from mmzero.analysis.sweep.ranks import Limits, Outcome, run_ranks
from mmzero.analysis.sweep.reduction import SIZES
from mmzero.analysis.sweep.training import Record, Way

PASSED, FAILED = 'passed', 'failed'
FAILS_PLAINLY, FAILS_UNDER_DDP = 'fails plainly', 'fails under DDP'
RANKS = 2
ROUNDINGS = (1, 2, 3)
"""Seeds tried, one after the other, until the distance is explained by rounding."""

WHATEVER_THE_SIZE = ('in build\n', 'in read\n', 'MissingOpError')
"""In a traceback: the config cannot be read, the model not built, or an operator is not installed."""
PLAIN = Way('none', 'equal')


@dataclass
class Verdict:
    """What a config came to under one stage.

    Args:
        config (str): Its name.
        stage (int): The ZeRO stage.
        status (str): 'passed', 'failed', 'fails plainly' or 'fails under DDP'.
        reason (str): Of any status but 'passed'. Defaults to ''.
        trace (str): The traceback, where there is one. Defaults to ''.
        parameters (int): Their number. Defaults to 0.
        units (int): The number of units. Defaults to 0.
        size (int): Side of the images in pixels. Defaults to 0.
        seconds (float): That the trainings of this verdict took. Defaults to 0.
        equal (dict): Distances from the plain model, by quantity.
        different (dict): Distances from DDP where one rank has no object, by quantity.
        own (dict): Distances from DDP where ranks have their own objects; measured where DDP fails without.
        rounded (dict): Distances of the references from themselves with gradients rounded otherwise, where one of the
            above is beyond its bound; by part, then by quantity.
    """

    config: str
    stage: int
    status: str
    reason: str = ''
    trace: str = ''
    parameters: int = 0
    units: int = 0
    size: int = 0
    seconds: float = 0.0
    equal: dict[str, float] = field(default_factory=dict)
    different: dict[str, float] = field(default_factory=dict)
    own: dict[str, float] = field(default_factory=dict)
    rounded: dict[str, dict[str, float]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Judge:
    """Trains one config and judges it, stage by stage; references are trained once.

    Args:
        config (str): A path, or a name such as ``mmdet::dino/...py``.
        limits (Limits): What a rank may use.
        sizes (Sequence[int]): Sides of the images to try, in pixels. Defaults to SIZES.
    """

    def __init__(self, config: str, limits: Limits, sizes: Sequence[int] = SIZES) -> None:
        self.config, self.limits, self.sizes = config, limits, sizes
        self.size = sizes[0]
        self.folder = Path(tempfile.mkdtemp(prefix='sweep-'))
        self._outcomes: dict[Way, tuple[list | None, Outcome]] = {}

    def close(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def judge(self, stage: int) -> Verdict:
        """Train what the stage needs and was not trained yet.

        Args:
            stage (int): The ZeRO stage.

        Returns:
            Verdict: The verdict.
        """
        before = self._seconds()
        verdict = Verdict(self.config, stage, PASSED)
        self._judge(verdict)
        verdict.size = self.size
        verdict.seconds = self._seconds() - before
        return verdict

    def _judge(self, verdict: Verdict) -> None:
        failure = self._plain()
        if failure:
            return self._fail(verdict, FAILS_PLAINLY, failure)
        verdict.parameters = self._outcomes[PLAIN][0][0]['numel']
        stage = verdict.stage
        ddp, ours = Way('ddp', 'empty'), Way('zero', 'empty', stage)
        self._train([ddp, Way('zero', 'equal', stage), ours])
        failed = self._failure(Way('zero', 'equal', stage))
        if failed:
            return self._fail(verdict, FAILED, failed)
        verdict.units = self._outcomes[Way('zero', 'equal', stage)][0][0]['units']
        faults = [self._compare(verdict, 'equal', Way('zero', 'equal', stage), PLAIN)]
        refused = self._failure(ddp)
        if refused:
            # What can be said of it: ranks with other objects, each with some.
            ddp, ours = Way('ddp', 'own'), Way('zero', 'own', stage)
            self._train([ddp, ours])
        failed = self._failure(ddp) or self._failure(ours)
        if not failed:
            faults.append(self._compare(verdict, 'own' if refused else 'different', ours, ddp))
        if self._failure(ours) and not self._failure(ddp):
            return self._fail(verdict, FAILED, self._failure(ours))
        if any(faults):
            return self._fail(verdict, FAILED, ('; '.join(filter(None, faults)), ''))
        if refused:
            self._fail(verdict, FAILS_UNDER_DDP, refused)

    def _plain(self) -> tuple[str, str] | None:
        """Find the first size on which the plain model trains; the failure on the last one, if none."""
        failure = None
        for size in self.sizes if PLAIN not in self._outcomes else ():
            self.size = size
            self._outcomes.pop(PLAIN, None)
            self._train([PLAIN], world_size=1)
            failure = self._failure(PLAIN)
            if failure is None or any(word in failure[1] for word in WHATEVER_THE_SIZE):
                break
        return self._failure(PLAIN)

    def _train(self, ways: Sequence[Way], world_size: int = RANKS) -> None:
        left = [way for way in ways if way not in self._outcomes]
        while left:
            outcome = run_ranks(self.config, self.size, left, world_size, self.folder, self.limits)
            tried = [*outcome.done, *([outcome.failed] if outcome.failed else [])]
            for way in tried:
                self._outcomes[way] = (outcome.done.get(way), outcome)
            left = [way for way in left if way not in tried]

    def _failure(self, way: Way) -> tuple[str, str] | None:
        done, outcome = self._outcomes[way]
        return None if done else (f'{way}: {outcome.reason}' if way != PLAIN else outcome.reason, outcome.trace)

    def _fail(self, verdict: Verdict, status: str, failure: tuple[str, str] | None) -> None:
        verdict.status = status
        verdict.reason, verdict.trace = failure or ('', '')

    def _seconds(self) -> float:
        return sum(outcome.seconds[way] for way, (_, outcome) in self._outcomes.items())

    def _compare(self, verdict: Verdict, part: str, ours: Way, theirs: Way) -> str:
        """Enter the distances of a part; returns what is beyond its bound."""
        try:
            found = self._distances(ours, theirs)
            setattr(verdict, part, found)
            if not beyond(found):
                return ''
            noise = verdict.rounded[part] = dict.fromkeys(found, 0.0)
            for seed in ROUNDINGS:
                way = Way(theirs.wrapper, theirs.data, rounding=seed)
                self._train([way], world_size=1 if theirs.wrapper == 'none' else RANKS)
                for what, value in self._distances(way, theirs).items():
                    noise[what] = max(noise[what], value)
                if not beyond(found, noise):
                    return ''
        except ValueError as error:
            return f'{part}: {error}'
        faults = [f'{what} {found[what]:.1e} > {bound:.1e}' for what, bound in beyond(found, noise).items()]
        return f'{part}: {", ".join(faults)}'

    def _distances(self, ours: Way, theirs: Way) -> dict[str, float]:
        """The largest over the ranks; of weights, rank 0's."""
        ranks = zip(*(self._records(way) for way in (ours, theirs)), strict=False)
        apart = [distances(found, reference) for found, reference in ranks]
        return {what: max(values[what] for values in apart if what in values) for what in apart[0]}

    def _records(self, way: Way) -> list[Record]:
        done = self._outcomes[way][0]
        if done is None:
            raise ValueError(f'{way}: {self._outcomes[way][1].reason}')
        records = [Record(losses=rank['losses'], norms=rank['norms']) for rank in done]
        weights = self.folder / str(way)
        if weights.exists():
            records[0] = Record(**torch.load(weights, mmap=True))
        # The plain model is to be compared with every rank.
        return records if way.wrapper != 'none' else records * RANKS
