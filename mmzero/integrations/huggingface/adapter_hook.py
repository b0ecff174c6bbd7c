"""A hook that saves adapters alone."""

import os
import shutil
from typing import Any

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mmzero.engines import on_rank0
from mmzero.errors import CheckpointError
from mmzero.integrations.huggingface.adapter_files import adapted_modules, save_adapters


@HOOKS.register_module()
class AdapterCheckpointHook(Hook):
    """Saves the adapters of PEFT during and after training, each time into a folder of its own.

    ``PeftModel.from_pretrained`` reads such a folder. Whole checkpoints, from which a run resumes, are
    ``default_hooks.checkpoint``'s business, as ever; they hold the frozen base as well.

    Args:
        interval (int): Epochs or iterations between two; -1: only at the end. Defaults to 1.
        by_epoch (bool): Whether the interval counts epochs. Defaults to True.
        out_dir (str, optional): Where the folders go. Defaults to None: ``adapters`` in the work dir.
        max_keep (int): How many of the latest are kept; -1: all. Defaults to -1.
        save_last (bool): Whether the end of training is saved in any case. Defaults to True.

    Raises:
        ValueError: If the interval or ``max_keep`` is neither positive nor -1.
    """

    priority = 'VERY_LOW'

    def __init__(
        self,
        interval: int = 1,
        by_epoch: bool = True,
        out_dir: str | None = None,
        max_keep: int = -1,
        save_last: bool = True,
    ) -> None:
        for name, value in (('interval', interval), ('max_keep', max_keep)):
            if value != -1 and value < 1:
                raise ValueError(f'{name}: got {value!r}; allowed: 1 or more, or -1')
        self.interval, self.by_epoch, self.save_last = interval, by_epoch, save_last
        self.out_dir, self.max_keep = out_dir, max_keep
        self._saved: list[str] = []

    def before_train(self, runner: Any) -> None:
        """Refuse a model without adapters.

        Args:
            runner (ZeroRunner): The runner.

        Raises:
            CheckpointError: If there is nothing to save.
        """
        if not adapted_modules(runner.sharded.module):
            model = type(runner.sharded.module).__name__
            raise CheckpointError(
                f'AdapterCheckpointHook: {model} has no adapters of PEFT; give it some (peft=dict(...)), or remove it'
            )

    def after_train_epoch(self, runner: Any) -> None:
        """Save where an epoch is due.

        Args:
            runner (ZeroRunner): The runner.
        """
        if self.by_epoch and self.interval > 0 and self.every_n_epochs(runner, self.interval):
            self._save(runner, f'epoch_{runner.epoch + 1}')

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Save where an iteration is due.

        Args:
            runner (ZeroRunner): The runner.
            batch_idx (int): Unused.
            data_batch: Unused.
            outputs: Unused.
        """
        if not self.by_epoch and self.interval > 0 and self.every_n_train_iters(runner, self.interval):
            self._save(runner, f'iter_{runner.iter + 1}')

    def after_train(self, runner: Any) -> None:
        """Save the end of training.

        Args:
            runner (ZeroRunner): The runner.
        """
        # Both count what is done by now.
        name = f'epoch_{runner.epoch}' if self.by_epoch else f'iter_{runner.iter}'
        if self.save_last and name not in [os.path.basename(path) for path in self._saved[-1:]]:
            self._save(runner, name)

    def _save(self, runner: Any, name: str) -> None:
        path = os.path.join(self.out_dir or os.path.join(runner.work_dir, 'adapters'), name)
        save_adapters(runner.sharded, path)
        self._saved.append(path)
        old = self._saved[: -self.max_keep] if self.max_keep > 0 else []
        self._saved = self._saved[len(old) :]
        on_rank0(lambda: _remove(old))
        runner.logger.info(f'saved adapters to {path}')


def _remove(folders: list[str]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
