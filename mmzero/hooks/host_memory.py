"""The memory column of the log where there is no GPU."""

import resource
import sys

import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS


@HOOKS.register_module()
class HostMemoryHook(Hook):
    """Log this process's largest resident memory, in MiB, as ``memory``.

    MMEngine logs it for GPUs only; with one this hook does nothing.
    """

    # Before LoggerHook, which reads what is logged here.
    priority = 'NORMAL'

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:  # type: ignore # noqa: D102
        if not torch.cuda.is_available():
            runner.message_hub.update_scalar('train/memory', max_resident_mib())


def max_resident_mib() -> int:
    """Largest resident memory of this process so far.

    Returns:
        int: MiB.
    """
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts KiB, macOS bytes.
    return size // (2**20 if sys.platform == 'darwin' else 2**10)
