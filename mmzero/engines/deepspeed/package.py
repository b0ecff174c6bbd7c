"""Getting hold of the deepspeed package, on the device that this rank computes on."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from mmzero.errors import ConfigError

# Found out by deepspeed on import: where there is no GPU, it would look for other accelerators first.
ACCELERATOR_VARIABLE = 'DS_ACCELERATOR'


def import_deepspeed(device_type: str) -> Any:
    """Import deepspeed. It takes seconds, so that only an engine that needs it does.

    Args:
        device_type (str): 'cpu' or 'cuda'.

    Returns:
        ModuleType: The package.

    Raises:
        ConfigError: If it is not installed, or was told to compute on another device.
    """
    os.environ.setdefault(ACCELERATOR_VARIABLE, device_type)
    try:
        deepspeed = importlib.import_module('deepspeed')
    except ModuleNotFoundError as error:
        if error.name != 'deepspeed':
            raise
        raise ConfigError(
            [
                "model_wrapper_cfg.engine: 'deepspeed' needs the package deepspeed, which is not installed; "
                "run pip install 'mmzero[deepspeed]', or use engine='fsdp2'"
            ]
        ) from None
    chosen = deepspeed.accelerator.get_accelerator().device_name()
    if chosen != device_type:
        raise ConfigError(
            [
                f'model_wrapper_cfg.engine: deepspeed computes on {chosen!r}, this rank on {device_type!r}; set the '
                f'environment variable {ACCELERATOR_VARIABLE}={device_type}'
            ]
        )
    _leave_op_unbuilt(deepspeed)
    return deepspeed


@contextmanager
def known_local_rank(device: torch.device) -> Iterator[None]:
    """Tell deepspeed this process's place on its node, which it reads from LOCAL_RANK alone and fails without.

    Args:
        device (torch.device): Where this rank computes.

    Yields:
        None: Inside, the variable is set, as it is already under a launcher.
    """
    if 'LOCAL_RANK' in os.environ:
        yield
        return
    os.environ['LOCAL_RANK'] = str(device.index or 0)
    try:
        yield
    finally:
        del os.environ['LOCAL_RANK']


@contextmanager
def without_memory_reports() -> Iterator[None]:
    """Keep deepspeed's optimizer of stage 1 in bfloat16 from reporting memory before and after each group.

    Each report collects garbage, which takes minutes for the groups that a ``paramwise_cfg`` makes: one per parameter.

    Yields:
        None: Inside, it reports nothing.
    """
    module = importlib.import_module('deepspeed.runtime.bf16_optimizer')
    with patch.object(module, 'see_memory_usage', lambda *args, **kwargs: None):
        yield


def forget_groups() -> None:
    """Have deepspeed make the groups of hpZ anew: it keeps those of the process's first model for all later ones."""
    module: Any = importlib.import_module('deepspeed.utils.groups')
    module._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def _leave_op_unbuilt(deepspeed: Any) -> None:
    """Keep deepspeed from compiling its all-reduce through shared memory, which only inference on a CPU uses.

    It would be built when the first process starts; a build that is killed leaves a lock behind, on which every later
    start waits for ever.
    """
    deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False
