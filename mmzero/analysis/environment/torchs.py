"""torch: how it was built. Nothing here initialises CUDA."""

import importlib
from typing import Any


def probe_torch() -> dict[str, Any]:
    """Ask torch about itself.

    Returns:
        dict[str, Any]: Versions of CUDA and NCCL that it was built with, its backends, and how many GPUs it sees.
    """
    torch = importlib.import_module('torch')
    distributed = importlib.import_module('torch.distributed')
    available = distributed.is_available()
    return dict(
        version=torch.__version__,
        cuda=torch.version.cuda,
        hip=getattr(torch.version, 'hip', None),
        gloo=available and distributed.is_gloo_available(),
        nccl=_nccl_version() if available and distributed.is_nccl_available() else None,
        # By NVML where it is there, which leaves CUDA alone.
        gpus=torch.cuda.device_count() if torch.version.cuda else 0,
        initialised_cuda=torch.cuda.is_initialized(),
    )


def _nccl_version() -> str:
    version = importlib.import_module('torch.cuda.nccl').version()
    return '.'.join(map(str, version)) if isinstance(version, tuple) else str(version)
