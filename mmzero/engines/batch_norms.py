"""Batch norms whose weights are of 16 bit, under autocast.

torch's batch norm wants weights and running statistics in one dtype, and statistics stay in float32 where an engine
rounds all parameters. Their input may be of 16 bit, as it is under DDP and autocast. So under autocast the weights are
brought to the dtype of the statistics; what stock torch computes stays as it is, and only what it refuses changes.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

_KEYS = dict(cpu='AutocastCPU', cuda='AutocastCUDA')


@cache
def teach_autocast_batch_norms(device_type: str) -> torch.library.Library:
    """Let batch norms under autocast take weights of another dtype than their statistics. Once for the process.

    Args:
        device_type (str): Where they compute.

    Returns:
        torch.library.Library: The registration, which holds for as long as it lives.
    """
    norm = torch.ops.aten.batch_norm.default

    def run(
        input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        with torch.autocast(device_type, enabled=False):
            return norm(input, _like(weight, mean), _like(bias, mean), mean, *args, **kwargs)

    library = torch.library.Library('aten', 'IMPL')
    library.impl('batch_norm', run, _KEYS[device_type])
    return library


def _like(weight: Tensor | None, statistics: Tensor | None) -> Tensor | None:
    return weight if weight is None or statistics is None else weight.to(statistics.dtype)
