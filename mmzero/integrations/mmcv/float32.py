"""Autocast learns mmcv's compiled operators.

[Note: mmcv's operators under autocast]
They are no operators of torch, so autocast leaves their inputs as they are. None of them has a kernel for bfloat16, and
nms has none for float16 either; deformable attention casts its sampling locations to the dtype of the values, which in
bfloat16 is a grid of 256 points over the whole image. In float32 all of them run, with locations and boxes as exact as
they came. What they give has the dtype that it has without us, since mmdet writes it into tensors of that dtype.
"""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

_FUNCTIONS = {
    'mmcv.ops.deform_conv': ('DeformConv2dFunction',),
    'mmcv.ops.focal_loss': ('SigmoidFocalLossFunction', 'SoftmaxFocalLossFunction'),
    'mmcv.ops.modulated_deform_conv': ('ModulatedDeformConv2dFunction',),
    'mmcv.ops.multi_scale_deform_attn': ('MultiScaleDeformableAttnFunction',),
    'mmcv.ops.nms': ('NMSop',),
    'mmcv.ops.roi_align': ('RoIAlignFunction',),
}
_HALF = (torch.float16, torch.bfloat16)


@cache
def teach_autocast_ops() -> tuple[str, ...]:
    """Let mmcv's operators compute in float32 where autocast is on. Once for the process, after ``mmcv.ops``.

    Returns:
        tuple[str, ...]: Names of the operators' classes that were found.
    """
    found = []
    for module, names in _FUNCTIONS.items():
        for name in names:
            function: Any = getattr(sys.modules.get(module), name, None)
            if function is not None:
                function.forward = staticmethod(_forward(function.forward))
                function.backward = staticmethod(_backward(function.backward))
                found.append(name)
    return tuple(found)


def _forward(forward: Callable) -> Callable:
    def run(ctx: Any, first: Tensor, *args: Any, **kwargs: Any) -> Any:
        device_type, halves = first.device.type, [item for item in (first, *args) if _is_half(item)]
        if not (halves and torch.is_autocast_enabled(device_type)):
            return forward(ctx, first, *args, **kwargs)
        kwargs = {name: _float32(value) for name, value in kwargs.items()}
        ctx.was_cast = True
        with torch.autocast(device_type, enabled=False):
            found = forward(ctx, *map(_float32, (first, *args)), **kwargs)
        # Indices, as those of nms, stay what they are.
        return found.to(first.dtype) if found.is_floating_point() else found

    return run


def _backward(backward: Callable) -> Callable:
    def run(ctx: Any, *grads: Any) -> Any:
        # What forward has saved is float32 then, and the kernels want one dtype. Saved tensors may be asked for once
        # alone, where a region is recomputed.
        return backward(ctx, *(map(_float32, grads) if getattr(ctx, 'was_cast', False) else grads))

    return run


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _HALF


def _float32(value: Any) -> Any:
    return value.float() if _is_half(value) else value
