"""Val and test with units of reduced precision.

[Note: precision of predictions]
Under mixed precision MMEngine trains in 16 bit and validates in float32. FSDP2 gathers a unit in one dtype for good, so
units of 16 bit stay so in val. Around them everything computes in float32: heads turn what the units found into scores
and boxes, which 16 bit would round to a quarter of a percent, and which numpy could not take.
A network of 16 bit that a model trains may be called in the step of another one that trains in float32, as a
discriminator is in the generator's; it is treated likewise. Under an autocast of the step's own nothing changes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from mmengine.utils import apply_to
from torch import Tensor, nn


@contextmanager
def units_alone_in(units: Sequence[tuple[nn.Module, torch.dtype, Sequence[str]]], device_type: str) -> Iterator[None]:
    """Run the forward of some modules under autocast, and hand on their results in float32.

    Args:
        units (Sequence[tuple[nn.Module, torch.dtype, Sequence[str]]]): The modules, the dtype of autocast in each, and
            its methods that count as forwards.
        device_type (str): Where they compute.

    Yields:
        None: Forwards inside behave so.
    """
    contexts: list[torch.autocast] = []
    is_mixed = False

    def enter(dtype: torch.dtype) -> None:
        nonlocal is_mixed
        if not contexts:
            is_mixed = torch.is_autocast_enabled(device_type)
        contexts.append(torch.autocast(device_type, dtype=dtype))
        contexts[-1].__enter__()

    def leave(dtype: torch.dtype, output: Any) -> Any:
        contexts.pop().__exit__(None, None, None)
        if contexts or is_mixed:
            # Within another unit, which computes in 16 bit as well, or what is around does so.
            return output
        return apply_to(output, lambda value: isinstance(value, Tensor) and value.dtype == dtype, Tensor.float)

    def around(method: Callable, dtype: torch.dtype) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            enter(dtype)
            return leave(dtype, method(*args, **kwargs))

        return run

    with ExitStack() as stack:
        stack.callback(lambda: [context.__exit__(None, None, None) for context in reversed(contexts)])
        for module, dtype, methods in units:
            before = module.register_forward_pre_hook(lambda *_, dtype=dtype: enter(dtype))
            after = module.register_forward_hook(lambda _, args, output, dtype=dtype: leave(dtype, output))
            stack.callback(before.remove)
            stack.callback(after.remove)
            for name in methods:
                stack.enter_context(patch.object(module, name, around(getattr(module, name), dtype)))
        yield
