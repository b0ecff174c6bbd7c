"""What ranks tell each other about where they are, and what follows from it.

[Note: ranks that part ways]
A rank that waits in a collective may wait for one that is slow (a long batch, a file that is written), which is no
fault, or for one that will never come. Slowness is told from the latter by where the other one is:

- It waits as well, and has come to another place at the same point of the order: they have parted ways.
- All ranks wait, and not at the same place: nobody is left to come. Between steps, where ranks may wait in a collective
  that is not mmzero's, this is not asked.
- Its process is gone, or it has left word of an error.

Ranks that all wait at the same place do not part ways; the process group's timeout is for these.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mmzero.engines.watch.trail import WHAT_TO_DO

BETWEEN_STEPS = 'between steps'


@dataclass(frozen=True)
class Report:
    """Where a rank is.

    Args:
        rank (int): The rank.
        count (int): How many places it has come to.
        last (list[str]): The last of them, the newest at the end.
        doing (str): What it does.
        waiting (float): For how long it has been waiting for others, in seconds; 0: it does not.
        stack (str): Its Python stack.
        host (str): The host.
        pid (int): The process.
        looks (int): How often its thread has looked. Defaults to 0.
        gone (bool): Whether its process is gone. Defaults to False.
    """

    rank: int
    count: int
    last: list[str]
    doing: str
    waiting: float
    stack: str
    host: str
    pid: int
    looks: int = 0
    gone: bool = False

    def text(self) -> str:
        """As it is left at the store."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str | bytes) -> 'Report':
        """The counterpart of :meth:`text`."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**fields)

    def place(self, index: int) -> str | None:
        """The place that it has come to at a point of the order; None: not kept, or not there yet."""
        position = index - (self.count - len(self.last))
        return self.last[position] if 0 <= position < len(self.last) else None

    def phase(self) -> str:
        """What it does, as far as all ranks do the same.

        Steps of val and test have numbers that may differ. Between steps ranks may wait in a collective of anybody's,
        for longer than the limit if much is sent.
        """
        if self.doing.startswith(('waiting ', 'in train_step ')):
            return self.doing
        return self.doing.split()[1] if self.doing.startswith('in ') else BETWEEN_STEPS

    def at(self) -> str:
        """Where it is, for an error."""
        place = self.last[-1] if self.last else 'no unit yet'
        return f'{place}, {self.doing}'


def parted(reports: Sequence[Report], limit: float) -> str | None:
    """Say how ranks have parted ways, if they have.

    Args:
        reports (Sequence[Report]): One of each rank, by rank.
        limit (float): For how long a rank has to wait until it counts, in seconds.

    Returns:
        str or None: The error.
    """
    waiting = [report for report in reports if report.waiting >= limit]
    if not waiting:
        return None
    for report in reports:
        if report.gone:
            return _gone(report, waiting[0])
    for index, other in enumerate(waiting):
        for one in waiting[:index]:
            where = _first_difference(one, other)
            if where is not None:
                return _apart(one, other, where)
    if len(waiting) == len(reports):
        first = max(waiting, key=lambda report: report.count)
        for other in waiting:
            between = first.phase() == other.phase() == BETWEEN_STEPS
            if first.phase() != other.phase() or (first.count != other.count and not between):
                return _apart(first, other, None)
    return None


def _first_difference(one: Report, other: Report) -> int | None:
    for index in range(min(one.count, other.count)):
        places = one.place(index), other.place(index)
        if None not in places and places[0] != places[1]:
            return index
    return None


def _apart(one: Report, other: Report, index: int | None) -> str:
    one, other = sorted((one, other), key=lambda report: report.rank)
    lines = ['ranks have parted ways, and wait for each other:']
    for report in (one, other):
        came = (
            f'was last at {report.at()}' if index is None else f'has come to {report.place(index)}; now {report.at()}'
        )
        lines.append(f'  rank {report.rank} {came}, and has waited for {report.waiting:.0f} s')
    lines += [f'  {WHAT_TO_DO}', *_stacks(one, other)]
    return '\n'.join(lines)


def _gone(report: Report, waiting: Report) -> str:
    return '\n'.join(
        [
            gone(report),
            f'  rank {waiting.rank} has waited for {waiting.waiting:.0f} s; it was last at {waiting.at()}',
            *_stacks(waiting),
        ]
    )


ENDED = 'left without an error'


def gone(report: Report) -> str:
    """Say that a rank is no more.

    Args:
        report (Report): Its last one.

    Returns:
        str: The error.
    """
    text = (
        f'rank {report.rank} has ended (process {report.pid} on {report.host} is gone): it was last at {report.at()}. '
    )
    if report.doing.startswith(ENDED):
        return text + (
            'Where ranks have different numbers of batches, iterate over model.join(loader, kind), which lets those '
            'that have no more take part until all are done'
        )
    return text + (
        'Unless it says why itself, it was killed: by the system where memory ran out (see its log), or by hand'
    )


def _stacks(*reports: Report) -> list[str]:
    return [f'  stack of rank {report.rank}:\n{report.stack}' for report in reports]
