"""Measuring a step of a config: the whole road of a training up to its second optimizer step."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from mmengine.config import Config
from mmengine.registry import LOOPS
from mmengine.runner import BaseLoop

from mmzero.analysis.step import StepReport, measure_step
from mmzero.errors import ConfigError
from mmzero.runner import ZeroRunner, build_runner


@LOOPS.register_module()
class MeasureLoop(BaseLoop):
    """Two optimizer steps in place of a training.

    Args:
        runner (Runner): The runner.
        dataloader (DataLoader or dict): Batches; one that ends starts again.
    """

    def __init__(self, runner: Any, dataloader: Any) -> None:
        super().__init__(runner, dataloader)
        self.report: StepReport | None = None

    @property
    def iter(self) -> int:
        """MMEngine counts from here."""
        return 0

    epoch = iter

    @property
    def max_iters(self) -> int:
        """Micro-batches of the two steps."""
        return 2 * self.runner.optim_wrapper._accumulative_counts

    max_epochs = max_iters

    def run(self) -> Any:
        """Measure.

        Returns:
            nn.Module: The wrapped model.
        """
        batches = self._batches()
        self.report = measure_step(self.runner.model, self.runner.optim_wrapper, lambda: next(batches))
        return self.runner.model

    def _batches(self) -> Iterator[Any]:
        for _ in itertools.count():
            yield from self.dataloader


def measure_config(cfg: Config) -> list[StepReport]:
    """Run a config up to its second optimizer step. Collective.

    Nothing is saved, evaluated or logged but warnings, and the learning rate is the config's own from the start.

    Args:
        cfg (Config): As for training; not changed.

    Returns:
        list[StepReport]: Of every rank; on ranks other than 0 only its own.

    Raises:
        ConfigError: If the config has faults, or is not one for ZeroRunner.
    """
    cfg = copy.deepcopy(cfg)
    cfg.pop('train_cfg', None)
    cfg.update(train_cfg=dict(type='MeasureLoop'), param_scheduler=None, resume=False, log_level='WARNING')
    cfg.update({f'{split}_{part}': None for split in ('val', 'test') for part in ('cfg', 'dataloader', 'evaluator')})
    runner = build_runner(cfg)
    if not isinstance(runner, ZeroRunner):
        raise ConfigError(["runner_type: a step is measured under ZeRO; add runner_type = 'mmzero.ZeroRunner'"])
    runner.train()
    report = runner.train_loop.report
    reports: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(report, reports if dist.get_rank() == 0 else None)
    return reports if dist.get_rank() == 0 else [report]
