"""A signal to one rank: all stop after the same iteration, save, and leave with the code of a scheduler's script."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from mmengine.hooks import Hook

from mmzero.errors import ConfigError, Preempted
from mmzero.hooks import PreemptionHook
from tests.distributed.cases import Faults, differing, merged
from tests.distributed.ranks import run_ranks
from tests.distributed.test_sharded import flat_shards, runner_of
from tests.vectors import Vectors, loader

pytestmark = pytest.mark.distributed

BATCHES = 20


class Signals(Hook):
    """Sends signals to this process."""

    def __init__(self, rank: int, number: signal.Signals, after: int) -> None:
        self.rank, self.number, self.after = rank, number, after

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if runner.rank == self.rank and runner.iter + 1 == self.after:
            os.kill(os.getpid(), self.number)


def run(folder: str, sharded: bool, *hooks: Hook, counts: int = 1, **changes: Any) -> Any:
    runner = runner_of(
        folder,
        'stage 3',
        2,
        dict(format='sharded', async_save=True) if sharded else dict(format='full'),
        train_dataloader=loader(Vectors(2 * BATCHES * dist.get_world_size())),
        optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=0.01), accumulative_counts=counts),
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=1)),
        **changes,
    )
    for hook in hooks:
        runner.register_hook(hook)
    runner.train()
    return runner


CASES = [
    (True, 1, signal.SIGUSR1, 1),
    (False, 0, signal.SIGTERM, 3),
    (False, 1, signal.SIGTERM, 1),
]


def preempted(folder: str, cases: list[tuple[bool, int, signal.Signals, int]]) -> Faults:
    found: Faults = {}
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    for sharded, rank, number, counts in cases:
        name = f'{sharded} {rank} {number.name} {counts}'
        faults = found[name] = []
        path = f'{folder}/{name}'
        wanted = flat_shards(run(f'{path}/whole', sharded, counts=counts))
        try:
            run(f'{path}/broken', sharded, Signals(rank, number, 3), PreemptionHook(every=4), counts=counts)
            faults.append('it went on')
        except Preempted as end:
            faults += [] if end.code == (85 if dist.get_rank() == 0 else 0) else [f'code {end.code}']
        last = Path(path, 'broken/last_checkpoint').read_text()
        # Two looks after the signal; a look is every 4 iterations, or every 12 with 3 micro-batches per step.
        end = f'preempted_iter_{24 if counts == 3 else 8}{"" if sharded else ".pth"}'
        faults += [] if last == f'{path}/broken/{end}' else [last]
        again = run(f'{path}/broken', sharded, PreemptionHook(), counts=counts, resume=True)
        faults += differing(flat_shards(again), wanted)
        faults += [] if again.iter == 2 * BATCHES else [f'ended at {again.iter}']
        faults += [] if {n: signal.getsignal(n) for n in before} == before else ['handlers stay']
    return found


@pytest.mark.parametrize(
    'ranks, cases', [(2, CASES[:1]), *(pytest.param(n, CASES, marks=pytest.mark.slow) for n in (2, 4))]
)
def test_all_ranks_stop_together(tmp_path: Path, ranks: int, cases: list) -> None:
    for case, faults in merged(run_ranks(ranks, preempted, str(tmp_path), cases)).items():
        assert not faults, f'{case}: {faults}'


@pytest.mark.parametrize(
    'fields, wanted',
    [
        (dict(signals=['SIGUSR3']), "PreemptionHook.signals: got 'SIGUSR3', which is no signal"),
        (dict(every=1), 'PreemptionHook.every: got 1; expected a number of iterations, 2 or more'),
    ],
)
def test_what_is_refused(fields: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        PreemptionHook(**fields)
