"""Loops of which ranks have different numbers of steps.

[Note: the end of a loop]
Ranks of a sharded model gather its units together, and in training they average gradients together. A rank that has no
more batches would leave the others waiting. So it waits at the end of the loop, at the store, and sees there what the
others start: whenever one is a step ahead it takes part in that step, and once all are at the end with the same number
of steps it goes on. Lengths of data loaders are not needed, and not trusted: those of iterable data sets and of some
batch samplers are wrong. Cost where ranks have the same number of steps: two messages per rank and loop, and a few that
ask whether all are there.
"""

from contextlib import suppress

import torch
import torch.distributed as dist

from mmzero._compat import default_store, group_timeout
from mmzero.engines.meeting import started
from mmzero.engines.place import alone, here, looks, places, raise_of_failed
from mmzero.errors import DataError, ZeroError


class Loop:
    """One pass of all ranks over their batches; a context, so that ranks that wait see who has left it by ``break``.

    Args:
        kind (str): 'train', 'val' or 'test'.
    """

    _count = 0

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.end = f'the end of its {kind} loop'
        # For the life of the process, so that keys are new also to the next process group.
        Loop._count += 1
        self.number = Loop._count
        self.key = f'mmzero/loop/{self.number}'

    def __enter__(self) -> 'Loop':
        here.loops.append(self.number)
        started(f'its {self.kind} loop')
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # What closes a generator: its consumer has left the loop, and does not wait for others that are at the end.
        if kind is GeneratorExit and not alone():
            # Rank 0, which keeps the store, may have ended.
            with suppress(RuntimeError):
                self._arrive()
        here.loops.remove(self.number)

    def which_ranks(self, have: bool, device: torch.device) -> list[bool]:
        """Tell all ranks which of them have something. Collective: one all-reduce of a number per rank.

        Args:
            have (bool): Whether this rank has.
            device (torch.device): Where this rank computes.

        Returns:
            list[bool]: By rank.
        """
        told = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
        told[dist.get_rank()] = 2 * here.steps + have
        dist.all_reduce(told)
        # A rank that failed once, and went on, may have started fewer.
        here.steps = max(number // 2 for number in told.tolist())
        return [bool(number % 2) for number in told.tolist()]

    def another_goes_on(self) -> bool:
        """Wait, where this rank has no more steps, for the others.

        Returns:
            bool: Whether a rank has started a step that this rank has not; False once all are at the end.

        Raises:
            ZeroError: If a rank has failed with what a user can mend.
            RuntimeError: If a rank has failed otherwise.
            DataError: If a rank does not come within the process group's timeout.
        """
        self._arrive()
        waiting_for = set(range(dist.get_world_size())) - {dist.get_rank()}
        for _ in looks():
            if default_store().check([f'{self.key}/all']):
                return False
            found = places(waiting_for)
            raise_of_failed(found)
            for rank, place in found.items():
                if self.number in place.loops and place.steps > here.steps:
                    return True
                if place.state == 'ends' and self.number in place.loops:
                    waiting_for.discard(rank)
        raise DataError(
            f'rank {dist.get_rank()} is at {self.end}, and ranks {sorted(waiting_for)} did not come to it within '
            f'{group_timeout()}'
        )

    def _arrive(self) -> None:
        # An iterator that is freed late must not speak for a rank that is elsewhere by now.
        if here.loops[-1] == self.number and here.state == 'goes':
            here.leave_word('ends', self.end)
        if default_store().add(f'{self.key}/after {here.steps}', 1) == dist.get_world_size():
            default_store().set(f'{self.key}/all', '')


def failed(error: BaseException) -> None:
    """Leave word that this rank has failed, so that those at the end of a loop do not wait for it.

    Args:
        error (BaseException): The error.
    """
    if alone():
        return
    try:
        text = f'{type(error).__name__}: {error}'
        here.leave_word('refused' if isinstance(error, ZeroError) else 'failed', text)
    except RuntimeError:
        # There is no store any more, and nobody waits.
        return
