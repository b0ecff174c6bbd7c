"""Val and test with units of reduced precision.

[Note: precision of predictions]
Under mixed precision MMEngine trains in 16 bit and validates in float32. FSDP2 gathers a unit in one dtype for good, so
units of 16 bit stay so in val. Around them everything computes in float32: heads turn what the units found into scores
and boxes, which 16 bit would round to a quarter of a percent, and which numpy could not take.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.utils import apply_to
from torch import Tensor, nn


@contextmanager
def units_alone_in(dtype: torch.dtype, units: Sequence[nn.Module], device_type: str) -> Iterator[None]:
    """Run the forward of some modules under autocast, and hand on their results in float32.

    Args:
        dtype (torch.dtype): The dtype of autocast.
        units (Sequence[nn.Module]): The modules.
        device_type (str): Where they compute.

    Yields:
        None: Forwards inside behave so.
    """
    contexts: list[torch.autocast] = []

    def enter(module: nn.Module, args: tuple) -> None:
        contexts.append(torch.autocast(device_type, dtype=dtype))
        contexts[-1].__enter__()

    def leave(module: nn.Module, args: tuple, output: Any) -> Any:
        contexts.pop().__exit__(None, None, None)
        if contexts:
            # Within another unit, whose weights are of the same dtype.
            return output
        return apply_to(output, lambda value: isinstance(value, Tensor) and value.dtype == dtype, Tensor.float)

    handles = []
    for unit in units:
        handles.append(unit.register_forward_pre_hook(enter))
        handles.append(unit.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        while contexts:
            contexts.pop().__exit__(None, None, None)
