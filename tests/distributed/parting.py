"""Ranks that part ways, for test_watch.py: ``python -m tests.distributed.parting CASE LIMIT`` on every rank.

Everything starts as it should; after two steps the ranks do different things.
"""

import logging
import os
import signal
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero.runner.launch import run_tool
from tests.models import Block, ToyModel, toy_batch

# What the model does on which rank; set by a case once training runs.
TURNS: dict[str, bool] = {}


class Turning(ToyModel):
    """Its forward takes another way where it is told to."""

    def __init__(self) -> None:
        super().__init__(scalar=False)
        self.blocks.append(Other(12, False))
        self.early = nn.Parameter(torch.zeros(12))
        self.stem.requires_grad_(False)

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        stem = self.stem(inputs)
        early = stem
        if TURNS.get('early'):
            # From here on what flows into the first block has a gradient.
            early = stem + self.early
        if TURNS.get('abreast'):
            x = self.blocks[0](early) + self.blocks[1](stem) + self.blocks[2](stem) + self.blocks[3](stem)
        elif TURNS.get('swap'):
            x = self.blocks[3](self.blocks[1](self.blocks[0](self.blocks[2](stem))))
        elif TURNS.get('skip'):
            x = self.blocks[0](stem)
        elif TURNS.get('skip in backward'):
            x = self.blocks[0](stem)
            with torch.no_grad():
                for block in self.blocks[1:]:
                    block(x)
        else:
            x = early
            for block in self.blocks:
                x = block(x)
        logits = self.head(x)
        return dict(loss=nn.functional.cross_entropy(logits, labels)) if mode == 'loss' else list(logits)


class Other(Block):
    """Of another size than the others, so that gloo cannot mistake them."""

    def __init__(self, width: int, scalar: bool) -> None:
        super().__init__(width, scalar)
        self.more = nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.more(x).mean()


class Run:
    """A training of this rank.

    Args:
        limit (float): Of the watch, in seconds.
        stage (int): Of ZeRO.
    """

    def __init__(self, limit: float, stage: int) -> None:
        torch.manual_seed(0)
        policy = dict(type='ModuleClassPolicy', classes=['Block', 'Other'])
        self.model = ZeroModelWrapper(
            module=Turning(), stage=stage, wrap_policy=policy, watch=limit, find_unused_parameters=True
        )
        self.optim = ZeroOptimWrapper(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.optim.initialize_count_status(self.model, 0, 100)
        self.limit = limit
        self.train(2)
        self.val(1)

    def train(self, steps: int) -> None:
        for step in range(steps):
            self.model.train_step(toy_batch(step), self.optim)

    @torch.no_grad()
    def val(self, steps: int) -> None:
        for step in range(steps):
            self.model.val_step(toy_batch(step))


def on_rank_1(turn: str) -> Callable[[Run], None]:
    """A case in which rank 1 takes another way in its forward."""

    def case(run: Run) -> None:
        TURNS[turn] = dist.get_rank() == 1
        run.train(2)

    return case


def backward_by_data(run: Run) -> None:
    """Of two blocks whose inputs have no gradient, that of the first has one on rank 1."""
    TURNS.update(abreast=True, early=dist.get_rank() == 1)
    run.train(2)


def val(run: Run) -> None:
    TURNS['skip'] = dist.get_rank() == 1
    run.val(2)


def batches(run: Run) -> None:
    """Rank 1 has a batch less, and goes on to what comes after the loop."""
    run.val(3 - dist.get_rank())
    dist.barrier()


def save(run: Run) -> None:
    """Rank 1 does not save, but waits for all."""
    if dist.get_rank() == 0:
        run.model.engine.model_state()
    dist.barrier()


def train_against_val(run: Run) -> None:
    """At stage 0 no unit tells where ranks are; before they part they do something of their own."""
    time.sleep(run.limit)
    (run.train if dist.get_rank() == 0 else lambda _: dist.barrier())(1)


def error(run: Run) -> None:
    if dist.get_rank() == 1:
        raise ValueError('the data of rank 1 are damaged')
    run.train(2)


def invalid_loss(run: Run) -> None:
    """A hook of mmdet looks at the loss, which is not finite on rank 1; the step itself is skipped."""
    from mmdet.engine.hooks import CheckInvalidLossHook

    hook, logger = CheckInvalidLossHook(interval=1), logging.getLogger('invalid loss')
    for step in range(3):
        batch = toy_batch(step)
        if dist.get_rank() == 1 and step == 1:
            batch['inputs'] = batch['inputs'] * float('nan')
        losses = run.model.train_step(batch, run.optim)
        hook.after_train_iter(types.SimpleNamespace(iter=step, logger=logger), step, batch, losses)


def memory(run: Run) -> None:
    if dist.get_rank() == 1:
        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')
    run.train(2)


def killed(run: Run) -> None:
    """Rank 1 dies without a word, while rank 0 waits at the store, where no connection to it breaks."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    run.model.engine.model_state()


def killed_in_a_step(run: Run) -> None:
    """gloo tells rank 0 that a connection is gone, and not whose."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    run.train(1)


def ended(run: Run) -> None:
    """Rank 1 has done its part and leaves."""
    if dist.get_rank() == 1:
        os._exit(0)
    run.model.engine.model_state()


def slow(run: Run) -> None:
    """No fault: rank 1 takes longer than the limit, in its own code, and in a loader's."""
    if dist.get_rank() == 1:
        time.sleep(2.5 * run.limit)
    run.train(1)
    if dist.get_rank() == 0:
        time.sleep(2.5 * run.limit)
    run.model.engine.model_state()
    run.val(1)
    busy(run)
    long_collective(run)
    print('all is well', flush=True)


def busy(run: Run) -> None:
    """Rank 1 is late; rank 0, which waited for it, then keeps the interpreter to itself: its watch cannot look."""
    if dist.get_rank() == 1:
        time.sleep(2 * run.limit)
    dist.barrier()
    if dist.get_rank() == 0:
        start, numbers = time.monotonic(), 10_000_000
        sum(range(numbers))
        # One call of C.
        sum(range(int(numbers * 2.5 * run.limit / (time.monotonic() - start))))
    run.train(1)


def long_collective(run: Run) -> None:
    """After a loop of which ranks had different numbers of batches they send for longer than the limit."""
    with torch.no_grad():
        for batch in run.model.join([toy_batch(0)] * (3 - dist.get_rank()), 'val'):
            run.model.val_step(batch)
    start, large = time.monotonic(), torch.ones(20_000_000)
    for _ in range(200):
        dist.all_reduce(large)
        enough = torch.tensor(float(time.monotonic() - start > 2.5 * run.limit))
        dist.all_reduce(enough)
        if enough:
            return


CASES = {
    'forward': on_rank_1('skip'),
    'another order': on_rank_1('swap'),
    'backward': on_rank_1('skip in backward'),
    'backward by data': backward_by_data,
    'val': val,
    'batches': batches,
    'save': save,
    'stage 0': train_against_val,
    'error': error,
    'invalid loss': invalid_loss,
    'memory': memory,
    'killed': killed,
    'killed in a step': killed_in_a_step,
    'ended': ended,
    'slow': slow,
}


def main() -> None:
    """Run the case that the command line names."""
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    CASES[sys.argv[1]](Run(float(sys.argv[2]), stage=0 if sys.argv[1] == 'stage 0' else 3))


if __name__ == '__main__':
    if os.environ.get('BARE'):
        main()
        dist.destroy_process_group()
    else:
        run_tool(main)
