"""Starting the ranks of a measurement where no launcher did."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from mmzero.engines import init_process_group


def join_ranks(nproc: int | None = None) -> torch.device:
    """Join the process group; a process that torchrun did not start becomes torchrun, with the same command line.

    Args:
        nproc (int, optional): Ranks to start. Defaults to None: one a GPU, or 2 on CPUs.

    Returns:
        torch.device: Where this rank computes.
    """
    if not dist.is_torchelastic_launched():
        count = nproc or torch.cuda.device_count() or 2
        if not torch.cuda.is_available():
            os.environ.setdefault('OMP_NUM_THREADS', '1')
        # After '--' torchrun takes no option of the tool's for one of its own.
        command: list[Any] = [sys.executable, '-m', 'torch.distributed.run', '--standalone']
        command += ['--nproc-per-node', count, '--']
        sys.stdout.flush()
        os.execv(sys.executable, [str(word) for word in [*command, *sys.argv]])
    init_process_group('pytorch')
    if torch.cuda.is_available():
        return torch.device('cuda', torch.cuda.current_device())
    return torch.device('cpu')
