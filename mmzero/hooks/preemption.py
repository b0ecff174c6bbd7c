"""A signal of a scheduler: save, and leave with a code that asks for another start."""

import math
import signal
import time
from types import FrameType
from typing import Any

import torch.distributed as dist
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.registry import HOOKS

from mmzero.engines import AgreedStop
from mmzero.errors import ConfigError, Preempted
from mmzero.wrappers.several import each


@HOOKS.register_module()
class PreemptionHook(Hook):
    """When a scheduler is about to end the job, save between two steps and leave.

    A signal may come to one rank alone: all of them stop after the same iteration, save a checkpoint that ``--resume``
    finds, and leave with the exit code 85 (:class:`mmzero.errors.Preempted`). ``tools/slurm_train.sh`` starts the job
    again then. Cost: a question to the store every ``every`` iterations.

    Args:
        signals (tuple[str, ...]): Names of signals. Defaults to SIGUSR1 (``srun --signal=USR1@120``) and SIGTERM.
        every (int): Iterations between two questions, 2 or more: ranks stop one to two of these after the signal.
            Defaults to 10.
    """

    priority = 'LOWEST'

    def __init__(self, signals: tuple[str, ...] | list[str] = ('SIGUSR1', 'SIGTERM'), every: int = 10) -> None:
        unknown = [name for name in signals if name not in signal.Signals.__members__]
        if unknown:
            raise ConfigError([f'PreemptionHook.signals: got {unknown[0]!r}, which is no signal, such as SIGUSR1'])
        if not isinstance(every, int) or every < 2:
            raise ConfigError([f'PreemptionHook.every: got {every!r}; expected a number of iterations, 2 or more'])
        self.signals = tuple(signal.Signals[name] for name in signals)
        self.every = every
        self._received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def before_train(self, runner) -> None:  # type: ignore # noqa: D102
        counts = [getattr(wrapper, '_accumulative_counts', 1) for wrapper in each(runner.optim_wrapper).values()]
        self._stop = AgreedStop(self.every, math.lcm(*counts))
        self._before = {number: signal.signal(number, self._receive) for number in self.signals}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = signal.Signals(number)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:  # type: ignore # noqa: D102
        done = runner.iter + 1
        if self._received is not None:
            self._stop.ask(done)
        if self._stop.is_now(done):
            self._leave(runner, done)

    def after_train(self, runner) -> None:  # type: ignore # noqa: D102
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _leave(self, runner: Any, done: int) -> None:
        name = self._received.name if self._received is not None else 'a signal on another rank'
        print_log(f'{name}: saving after iteration {done}, to go on from there by --resume', 'current')
        runner.save_now(f'preempted_iter_{done}.pth', dict(epoch=runner.epoch, iter=done))
        runner.finish_saving()
        dist.barrier()
        self.after_train(runner)
        if dist.get_rank() == 0:
            # srun ends all tasks when one leaves with another code than 0, which the others do not.
            time.sleep(1.0)
        raise Preempted(dist.get_rank())
