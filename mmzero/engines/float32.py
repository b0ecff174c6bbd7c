"""What computes in float32 under autocast besides what autocast itself knows: losses, and boxes with their regions.

[Note: losses and boxes under autocast]
Autocast knows torch's own losses, by function. Those of the OpenMMLab packages are written out operator by operator
(DINO's focal loss on a CPU multiplies and sums in 16 bit, and gives a loss rounded to a quarter of a percent). And RoI
extractors of mmdet cast boxes to the dtype of the features: in bfloat16 an edge at 700 pixels is off by up to 2. So
these get their inputs in float32, as ``force_fp32`` of earlier versions of mmdet had it. What comes out is float32, and
autocast casts it again where a layer wants 16 bit.
"""

import sys
from typing import Any

import torch
from mmengine.utils import apply_to
from torch import Tensor, nn

_LOSSES = 'losses'
"""The packages in which mmdet, mmseg, mmpretrain and their like define losses are called so."""
_TORCH_LOSSES = 'torch.nn.modules.loss'
_EXTRACTORS = ('BaseRoIExtractor',)
_HALF = (torch.float16, torch.bfloat16)


def compute_in_float32(model: nn.Module, device_type: str) -> None:
    """Give losses and RoI extractors of a model their inputs in float32 where autocast is on.

    mmcv's compiled operators, where they are loaded, learn it for all models of the process.

    Args:
        model (nn.Module): The model.
        device_type (str): Where it computes.
    """
    for module in model.modules():
        if takes_float32(module):
            module.register_forward_pre_hook(_Cast(device_type), with_kwargs=True)
    if 'mmcv.ops' in sys.modules:
        # Not from its package, which is imported before torch.
        from mmzero.integrations.mmcv.float32 import teach_autocast_ops

        teach_autocast_ops()


def takes_float32(module: nn.Module) -> bool:
    """Whether a module is a loss, or one that computes with boxes.

    Args:
        module (nn.Module): The module.

    Returns:
        bool: Whether it is.
    """
    return any(
        _LOSSES in cls.__module__.split('.') or cls.__module__ == _TORCH_LOSSES or cls.__name__ in _EXTRACTORS
        for cls in type(module).__mro__
    )


class _Cast:
    """A forward pre-hook; a class, so that copies and pickles of the model take it along."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    def __call__(self, _: nn.Module, args: tuple, kwargs: dict) -> tuple[Any, Any] | None:
        if not torch.is_autocast_enabled(self.device_type):
            return None
        return apply_to((args, kwargs), lambda value: isinstance(value, Tensor) and value.dtype in _HALF, Tensor.float)
