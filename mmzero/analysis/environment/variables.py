"""Environment variables that decide how a run behaves. Only known ones are told, so that no secret is."""

import os
import re
from collections.abc import Mapping
from typing import Any

PREFIXES = ('NCCL_', 'GLOO_', 'TORCH_', 'TORCHINDUCTOR_', 'TORCHELASTIC_', 'PYTORCH_', 'OMP_', 'MKL_', 'KMP_', 'DS_')
NAMES = (
    'RANK',
    'WORLD_SIZE',
    'LOCAL_RANK',
    'LOCAL_WORLD_SIZE',
    'GROUP_RANK',
    'MASTER_ADDR',
    'MASTER_PORT',
    'SLURM_PROCID',
    'SLURM_NTASKS',
    'SLURM_LOCALID',
    'SLURM_NNODES',
    'SLURM_STEP_TASKS_PER_NODE',
    'OMPI_COMM_WORLD_RANK',
    'OMPI_COMM_WORLD_SIZE',
    'OMPI_COMM_WORLD_LOCAL_RANK',
    'PMI_RANK',
    'PMI_SIZE',
    'MPI_LOCALRANKID',
    'CUDA_VISIBLE_DEVICES',
    'CUDA_DEVICE_ORDER',
    'CUDA_LAUNCH_BLOCKING',
    'CUDA_HOME',
    'CUBLAS_WORKSPACE_CONFIG',
    'CC',
    'CXX',
    'LD_PRELOAD',
    'HF_HUB_OFFLINE',
    'TRANSFORMERS_OFFLINE',
    'TOKENIZERS_PARALLELISM',
    'TMPDIR',
)

_SECRET = re.compile(r'TOKEN|KEY|SECRET|PASS|CRED|AUTH|COOKIE', re.IGNORECASE)
_LOGIN = re.compile(r'//[^/@\s]+@')


def probe_variables() -> dict[str, Any]:
    """Read the variables.

    Returns:
        dict[str, Any]: Name to value, of those that are set.
    """
    return told(os.environ)


def told(environment: Mapping[str, str]) -> dict[str, str]:
    """Choose what may be told.

    Args:
        environment (Mapping[str, str]): All variables.

    Returns:
        dict[str, str]: Known ones; without any whose name speaks of a secret, and without logins in addresses.
    """
    known = [name for name in environment if name in NAMES or name.startswith(PREFIXES)]
    return {name: _LOGIN.sub('//...@', environment[name]) for name in sorted(known) if not _SECRET.search(name)}
