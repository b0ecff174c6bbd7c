"""Ranks that part ways end soon, each with an error that names where both are; see parting.py."""

import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import OptimWrapper

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from tests.distributed import parting
from tests.distributed.ranks import run_ranks
from tests.distributed.training import full
from tests.models import ToyModel, toy_batch

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 2
# To start, import and train two steps; generous, since a hang would take the group's half hour.
PATIENCE_SECONDS = 120


@dataclass
class Ended:
    """How a rank has ended."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        return self.err.strip().splitlines()[-1]


def run(case: str, ranks: int = 2, limit: float = LIMIT, bare: bool = False) -> list[Ended]:
    """Run a case of parting.py on ranks without a launcher, which would end those that are slower to say it."""
    with socket.socket() as sock:
        sock.bind(('127.0.0.1', 0))
        port = sock.getsockname()[1]
    command = [sys.executable, '-m', 'tests.distributed.parting', case, str(limit)]
    common = dict(os.environ, WORLD_SIZE=str(ranks), MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    common.update({'BARE': '1'} if bare else {}, OMP_NUM_THREADS='1', PYTHONPATH=str(ROOT))
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=dict(common, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        texts = [process.communicate(timeout=PATIENCE_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [Ended(process.returncode, *text) for process, text in zip(processes, texts, strict=True)]


def places_in(text: str) -> set[str]:
    """Where ranks are by an error: units, and what they do there."""
    return set(re.findall(r'rank \d (?:has come to|was last at|to) (.*?)(?:, and |\. |$)', text, flags=re.MULTILINE))


def check_both_name_both(ended: list[Ended], *wanted: str) -> None:
    """Each rank's last error names two places, and what else is wanted."""
    for rank in ended:
        assert rank.code in (1, 2), rank
        text = rank.err[rank.err.rindex('error: ranks have parted ways') :]
        assert len(places_in(text)) == 2, text
        assert all(part in text for part in wanted), text


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    'case, wanted',
    [
        pytest.param('forward', ['the forward of the unit blocks.1 (Block), in train_step 3'], marks=SLOW),
        pytest.param('another order', ['unit blocks.0 (Block)', 'unit blocks.2 (Block)'], marks=SLOW),
        ('backward', ['the backward of the unit blocks.3 (Other)', 'the backward of the unit blocks.0 (Block)']),
        pytest.param('backward by data', ['the reduction of the unit', 'in train_step 3'], marks=SLOW),
        pytest.param('val', ['the forward of the unit blocks.1 (Block), in val_step 2'], marks=SLOW),
        pytest.param(
            'batches',
            ['the forward of the unit (root) (Turning), in val_step 4', 'after val_step 3', ' batches'],
            marks=SLOW,
        ),
        ('save', ["waiting for all ranks to gather the model's weights", 'after val_step 1', ' barrier']),
    ],
)
def test_ranks_part_ways(case: str, wanted: list[str]) -> None:
    check_both_name_both(run(case), *wanted)


@SLOW
@pytest.mark.parametrize('case', ['forward', 'backward', 'val', 'save'])
def test_ranks_part_ways_with_a_limit_of_ten_seconds(case: str) -> None:
    check_both_name_both(run(case, limit=10))


@SLOW
@pytest.mark.parametrize('case', ['forward', 'backward', 'save'])
def test_one_of_four_parts_ways(case: str) -> None:
    check_both_name_both(run(case, ranks=4))


def alone_after_a_group() -> list[float]:
    """Ranks that leave their group and train each on its own, other models, compare nothing any more."""
    rank = dist.get_rank()
    losses = []
    for depth in (2, 2 + rank):
        policy = dict(type='ModuleClassPolicy', classes=['Block'])
        model = ZeroModelWrapper(module=ToyModel(depth=depth), wrap_policy=policy, find_unused_parameters=True)
        optim = ZeroOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
        optim.initialize_count_status(model, 0, 10)
        losses += [float(model.train_step(toy_batch(step), optim)['loss'].detach()) for step in range(2)]
        if depth == 2 and len(losses) == 2:
            dist.barrier()
            dist.destroy_process_group()
            dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    return losses


def test_alone_after_a_group() -> None:
    assert all(len(losses) == 4 for losses in run_ranks(2, alone_after_a_group))


class LossesByData(ToyModel):
    """A second loss has a gradient where there is an object: on rank 0 alone."""

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        out = super().forward(inputs, labels, mode)
        if mode == 'loss':
            out['loss_more'] = out['loss'] ** 2 if dist.get_rank() == 0 else torch.zeros(())
        return out


def losses_by_data() -> int:
    policy = dict(type='ModuleClassPolicy', classes=['Block'])
    model = ZeroModelWrapper(module=LossesByData(), wrap_policy=policy, find_unused_parameters=True)
    optim = ZeroOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    optim.initialize_count_status(model, 0, 10)
    return sum(model.train_step(toy_batch(step), optim)['loss'].isfinite().item() for step in range(2))


def test_losses_by_data_are_no_other_place() -> None:
    """Each loss with a gradient asks for the root's parameters; ranks have come to one place all the same."""
    assert run_ranks(2, losses_by_data) == [2, 2]


def gradients_by_data(stage: int | None) -> list[torch.Tensor]:
    """Train where what flows into the first block, behind a frozen stem, has a gradient on rank 1 alone."""
    torch.manual_seed(0)
    parting.TURNS['early'] = dist.get_rank() == 1
    net = parting.Turning()
    if stage is None:
        model: Any = MMDistributedDataParallel(net, device_ids=None, find_unused_parameters=True)
        optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    else:
        policy = dict(type='ModuleClassPolicy', classes=['Block', 'Other'])
        model = ZeroModelWrapper(module=net, stage=stage, wrap_policy=policy, find_unused_parameters=True)
        optim = ZeroOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    optim.initialize_count_status(model, 0, 100)
    for step in range(3):
        model.train_step(toy_batch(2 * step + dist.get_rank()), optim)
    return [full(param).clone() for param in net.parameters()]


def as_under_ddp() -> list[bool]:
    wanted = gradients_by_data(None)
    return [
        all(torch.allclose(*pair, rtol=1e-5, atol=1e-7) for pair in zip(gradients_by_data(stage), wanted, strict=True))
        for stage in (1, 2, 3)
    ]


def test_a_gradient_that_flows_into_the_first_unit_by_data() -> None:
    """The unit reduces before the root on all ranks."""
    assert run_ranks(2, as_under_ddp) == [[True] * 3] * 2


@SLOW
def test_without_units() -> None:
    for rank in run('stage 0'):
        assert rank.code == 1 and 'in train_step 3' in rank.err and 'after val_step 1' in rank.err


@pytest.mark.parametrize(
    'case, last, bare',
    [
        ('error', 'ValueError: the data of rank 1 are', False),
        ('memory', 'OutOfMemoryError', True),
        pytest.param('error', 'ValueError: the data of rank 1 are', True, marks=pytest.mark.slow),
        pytest.param('memory', 'OutOfMemoryError', False, marks=pytest.mark.slow),
    ],
)
def test_an_error_of_one_rank_ends_all_and_is_the_last_word(case: str, last: str, bare: bool) -> None:
    other, failed = run(case, bare=bare)
    assert failed.code == 1 and last in failed.last
    assert other.code == 1 and 'Error' not in other.err and 'error:' not in other.err


@SLOW
@pytest.mark.parametrize('case, text', [('error', 'the data of rank 1 are'), ('backward', 'ranks have parted ways')])
@pytest.mark.parametrize('bare', [False, True])
def test_torchruns_summary_ends_with_the_error(case: str, text: str, bare: bool) -> None:
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2']
    done = subprocess.run(
        [*command, '-m', 'tests.distributed.parting', case, str(LIMIT)],
        cwd=ROOT,
        env=dict(os.environ, OMP_NUM_THREADS='1', PYTHONPATH=str(ROOT), **({'BARE': '1'} if bare else {})),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    summary = done.stderr.rpartition('Root Cause')[2]
    assert done.returncode == 1 and text in summary, done.stderr[-3000:]


@pytest.mark.parametrize(
    'case', ['killed in a step', pytest.param('killed', marks=SLOW), pytest.param('ended', marks=SLOW)]
)
def test_a_rank_that_is_gone(case: str) -> None:
    left, _ = run(case)
    assert left.code == 1
    assert re.search(r'error: rank 1 has ended \(process \d+ on .* is gone\): it was last at the ', left.err)
    assert 'Traceback' not in left.err


@pytest.mark.slow
def test_a_slow_rank_is_no_fault() -> None:
    for rank in run('slow'):
        assert rank.code == 0 and rank.out.endswith('all is well\n'), rank
