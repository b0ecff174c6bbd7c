"""The process group, from any launcher, on GPUs or on CPUs, or of one where there is no launcher."""

import os
import re
import subprocess
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from mmzero.engines.attempt import fresh_store, shares_agents_store
from mmzero.errors import ConfigError, near_names

LAUNCHERS = {
    'none': (),
    'pytorch': (('RANK', 'WORLD_SIZE', 'LOCAL_RANK'),),
    'slurm': (('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_LOCALID'),),
    # Open MPI, then MPICH and Intel MPI.
    'mpi': (
        ('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_LOCAL_RANK'),
        ('PMI_RANK', 'PMI_SIZE', 'MPI_LOCALRANKID'),
    ),
}
"""Launcher to the variables that it sets: rank, world size, rank within the node."""


def world_size_of(launcher: str) -> int:
    """Read the number of ranks from the environment, before a process group exists.

    Args:
        launcher (str): A key of :data:`LAUNCHERS`.

    Returns:
        int: The world size; 1 without a launcher.

    Raises:
        ValueError: If the launcher is unknown or its variables are not set.
    """
    return _ranks(launcher)[1]


def _ranks(launcher: str) -> tuple[int, int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size(), int(os.environ.get('LOCAL_RANK', 0))
    if launcher == 'none':
        return 0, 1, 0
    if launcher not in LAUNCHERS:
        raise ValueError(f'launcher {launcher!r} is unknown{near_names(launcher, LAUNCHERS)}')
    for names in LAUNCHERS[launcher]:
        if names[0] in os.environ and names[1] in os.environ:
            rank, world_size, local_rank = (int(os.environ.get(name, 0)) for name in names)
            return rank, world_size, local_rank
    wanted = ' or '.join('/'.join(names) for names in LAUNCHERS[launcher])
    raise ValueError(
        f'launcher {launcher!r} sets {wanted}, which this process does not have; start it through '
        f'{_STARTERS[launcher]}, or leave --launcher out to run one process'
    )


def ranks_per_node() -> int | None:
    """Read from the environment how many ranks share a node.

    Returns:
        int or None: The number; None where no launcher says it, or nodes have different ones.
    """
    if dist.is_initialized() and dist.get_world_size() == 1:
        return 1
    for name in ('LOCAL_WORLD_SIZE', 'OMPI_COMM_WORLD_LOCAL_SIZE', 'MPI_LOCALNRANKS'):
        if name in os.environ:
            return int(os.environ[name])
    # '8' or '8(x4)'; '8(x3),4' for nodes that differ.
    tasks = re.fullmatch(r'(\d+)(\(x\d+\))?', os.environ.get('SLURM_STEP_TASKS_PER_NODE', ''))
    return int(tasks[1]) if tasks else None


def is_on_first_node() -> bool:
    """Say whether this process is on the node of rank 0, whose files rank 0 reads.

    Returns:
        bool: True where no launcher tells.
    """
    return os.environ.get('GROUP_RANK', os.environ.get('SLURM_NODEID', '0')) == '0'


_STARTERS = {'pytorch': 'torchrun', 'slurm': 'srun', 'mpi': 'mpirun'}


def init_process_group(launcher: str = 'none', backend: str | None = None, **kwargs: Any) -> None:
    """Join the process group; does nothing where one exists.

    Args:
        launcher (str): 'none' (a group of one), 'pytorch', 'slurm' or 'mpi'. Defaults to 'none'.
        backend (str, optional): Defaults to None: 'nccl' with GPUs, 'gloo' without. 'nccl' without a GPU
            becomes 'gloo', so that a config runs on both.
        **kwargs: Further fields of ``env_cfg.dist_cfg``; ``timeout`` is in seconds, ``port`` is slurm's.
    """
    if dist.is_initialized():
        return
    if backend is None or not torch.cuda.is_available():
        backend = 'nccl' if torch.cuda.is_available() else 'gloo'
    if 'timeout' in kwargs:
        kwargs['timeout'] = timedelta(seconds=kwargs['timeout'])
    port = kwargs.pop('port', None)
    kwargs.pop('init_backend', None)
    rank, world_size, local_rank = _ranks(launcher)
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    if launcher == 'none':
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **kwargs)
        return
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local_rank))
    if launcher == 'slurm' and 'MASTER_ADDR' not in os.environ:
        os.environ['MASTER_ADDR'] = _first_slurm_host()
    if port is not None:
        os.environ['MASTER_PORT'] = str(port)
    os.environ.setdefault('MASTER_PORT', '29500')
    if 'MASTER_ADDR' not in os.environ:
        raise ConfigError([f'launcher {launcher!r}: set MASTER_ADDR to the address of the node of rank 0'])
    if launcher == 'pytorch' and shares_agents_store() and not {'store', 'init_method'} & kwargs.keys():
        timeout = kwargs.get('timeout', default_pg_timeout)
        store, rank, world_size = next(dist.rendezvous('env://', timeout=timeout))
        kwargs |= dict(store=fresh_store(store, rank, world_size, timeout), rank=rank, world_size=world_size)
    dist.init_process_group(backend, **kwargs)


def _first_slurm_host() -> str:
    nodes = os.environ.get('SLURM_NODELIST', '')
    command = ['scontrol', 'show', 'hostnames', nodes]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        reason = f'scontrol does not name the first of SLURM_NODELIST={nodes!r} ({error}); set MASTER_ADDR'
        raise ConfigError([f"launcher 'slurm': {reason}"]) from None
