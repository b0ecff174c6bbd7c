"""What computes in which dtype where all parameters are of 16 bit.

[Note: 16 bit under DeepSpeed]
DeepSpeed casts every parameter to 16 bit, where FSDP2 leaves those outside of units in float32. So autocast runs over
the whole forward of training, which keeps norms and losses in float32 whatever their weights are, and brings inputs to
a layer's dtype: images are cast, boxes never. Two things autocast does not know. An embedding gives out its weights'
dtype, and models write that into tensors of float32 (DINO's denoising queries): here it gives out float32. And
DeepSpeed's engine turns autocast of others off around the model's forward, so that it is turned on inside.

In val and test MMEngine computes in float32, and predictions are float32. There each module that holds parameters runs
by itself under autocast and hands on float32, as FSDP2's units of 16 bit do ([Note: precision of predictions]).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mmzero.engines.batch_norms import teach_autocast_batch_norms
from mmzero.engines.cpu_norms import teach_autocast_norms
from mmzero.engines.evaluation import units_alone_in

HALF = (torch.bfloat16, torch.float16)


class HalfPrecision:
    """Forwards of a model whose parameters are about to be of 16 bit.

    Args:
        model (nn.Module): The model.
        dtype (torch.dtype): bfloat16 or float16.
        device_type (str): Where it computes.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, device_type: str) -> None:
        if device_type == 'cpu':
            teach_autocast_norms()
        teach_autocast_batch_norms(device_type)
        self.device_type = device_type
        self.holders = [(module, dtype, ()) for module in model.modules() if any(True for _ in module._parameters)]
        for module in model.modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                module.register_forward_hook(_to_float32)

    def evaluating(self) -> AbstractContextManager:
        """The context of a forward in val and test."""
        return units_alone_in(self.holders, self.device_type)


@contextmanager
def autocast_inside(model: nn.Module, device_type: str) -> Iterator[None]:
    """Have this moment's autocast in a model's forward, whatever its caller turns off in between.

    Args:
        model (nn.Module): The model.
        device_type (str): Where it computes.

    Yields:
        None: Forwards of the model inside run under it; what is around them does not.
    """
    if not torch.is_autocast_enabled(device_type):
        yield
        return
    inner = torch.autocast(device_type, dtype=torch.get_autocast_dtype(device_type))

    def enter(*_: Any) -> None:
        inner.__enter__()

    def leave(*_: Any) -> None:
        inner.__exit__(None, None, None)

    before = model.register_forward_pre_hook(enter)
    after = model.register_forward_hook(leave, always_call=True)
    try:
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        before.remove()
        after.remove()


def _to_float32(module: nn.Module, args: Any, output: Any) -> Any:
    return output.float() if isinstance(output, Tensor) and output.dtype in HALF else output
