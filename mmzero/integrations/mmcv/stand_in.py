"""A stand-in for ``mmcv._ext``, the compiled module that mmcv-lite does not ship.

mmcv-lite ships ``mmcv/ops/*.py`` without ``mmcv._ext``, so ``import mmcv.ops`` fails, and with it
``mmdet.models``, also for models that never call a compiled op. With the stand-in in
``sys.modules`` these imports work, and only a call to an op that is not there fails.

Nothing in mmcv is patched. Neither torch nor mmcv is imported before an op is called.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch

_EXT_NAME = 'mmcv._ext'


class MissingOpError(NotImplementedError):
    """A compiled op of mmcv was called while the stand-in holds its place.

    It takes a finished message, nothing else, because DataLoader workers and process pools build
    the error of a worker anew from its text.
    """


def install_stand_in() -> bool:
    """Put the stand-in into ``sys.modules`` if mmcv is there and its compiled module is not.

    Safe to call any number of times; does not import mmcv.

    Returns:
        bool: True if the stand-in is in place when this returns, False if there is no mmcv or if
        mmcv has its own compiled module.
    """
    if _EXT_NAME in sys.modules:
        return isinstance(sys.modules[_EXT_NAME], _StandIn)
    mmcv_spec = importlib.util.find_spec('mmcv')
    if mmcv_spec is None or _has_compiled_module(mmcv_spec):
        return False
    # A spec with a loader is what `pkgutil.find_loader` looks for, so MMEngine's
    # `mmcv_full_available()` answers True. Its callers then import classes from `mmcv.ops`, which
    # works, and so `dcn_offset_lr_mult` and `revert_sync_batchnorm` act as with the full mmcv.
    spec = importlib.machinery.ModuleSpec(_EXT_NAME, _StandInLoader(), origin='mmzero stand-in')
    sys.modules[_EXT_NAME] = importlib.util.module_from_spec(spec)
    return True


def _has_compiled_module(mmcv_spec: importlib.machinery.ModuleSpec) -> bool:
    # `importlib.util.find_spec(_EXT_NAME)` would import mmcv, and with it torch and OpenCV.
    folders = mmcv_spec.submodule_search_locations
    return importlib.machinery.PathFinder.find_spec(_EXT_NAME, folders) is not None


class _StandIn(ModuleType):
    """A module that makes up an op for every public name asked of it."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # inspect, pickle, doctest and `import *` probe modules for names like `__file__`.
        if name.startswith('_'):
            raise AttributeError(f'module {self.__name__!r} has no attribute {name!r}')
        op = _WORKING_OPS.get(name) or _missing_op(name)
        setattr(self, name, op)
        return op


class _StandInLoader(importlib.abc.Loader):
    """Makes the stand-in for the import system; there is no file behind it."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name, 'Holds the place of the compiled module of mmcv.')

    def exec_module(self, module: ModuleType) -> None:
        pass


def _missing_op(name: str) -> Callable[..., NoReturn]:
    def op(*args: Any, **kwargs: Any) -> NoReturn:
        raise MissingOpError(_missing_op_message(name))

    op.__name__ = op.__qualname__ = name
    op.__module__ = _EXT_NAME
    return op


def _missing_op_message(name: str) -> str:
    lite_version = _lite_version()
    lite, full = 'mmcv-lite', "'mmcv>=2.0,<2.2'"
    if lite_version is not None:
        lite, full = f'mmcv-lite {lite_version}', f'mmcv=={lite_version}'
    return (
        f'The mmcv op {name!r} was called, but it needs the compiled module {_EXT_NAME}, which '
        f'{lite} does not ship; mmzero only holds its place so that mmcv.ops can be imported. '
        'Install the full mmcv of the same version instead: '
        f'pip uninstall mmcv-lite; pip install {full}'
    )


def _lite_version() -> str | None:
    try:
        return metadata.version('mmcv-lite')
    except metadata.PackageNotFoundError:
        return None


# What follows takes the place of compiled functions, and keeps their names and arguments.


def ms_deform_attn_forward(
    value: 'torch.Tensor',
    value_spatial_shapes: 'torch.Tensor',
    value_level_start_index: 'torch.Tensor',
    sampling_locations: 'torch.Tensor',
    attention_weights: 'torch.Tensor',
    *,
    im2col_step: int,
) -> 'torch.Tensor':
    """Multi-scale deformable attention by mmcv's own PyTorch function.

    mmcv calls this on CUDA only; on a CPU it takes the PyTorch function by itself.

    Args:
        value (torch.Tensor): Shape (batch, keys, heads, channels of a head).
        value_spatial_shapes (torch.Tensor): Height and width of each level, shape (levels, 2).
        value_level_start_index (torch.Tensor): Unused, follows from the shapes.
        sampling_locations (torch.Tensor): Shape (batch, queries, heads, levels, points, 2), in
            [0, 1].
        attention_weights (torch.Tensor): Shape (batch, queries, heads, levels, points).
        im2col_step (int): Unused, a matter of the compiled kernel.

    Returns:
        torch.Tensor: Shape (batch, queries, heads * channels of a head), in the dtype of value.
    """
    _warn_slow_attention()
    return _deformable_attention(value, value_spatial_shapes, sampling_locations, attention_weights)


def ms_deform_attn_backward(
    value: 'torch.Tensor',
    value_spatial_shapes: 'torch.Tensor',
    value_level_start_index: 'torch.Tensor',
    sampling_locations: 'torch.Tensor',
    attention_weights: 'torch.Tensor',
    grad_output: 'torch.Tensor',
    grad_value: 'torch.Tensor',
    grad_sampling_loc: 'torch.Tensor',
    grad_attn_weight: 'torch.Tensor',
    *,
    im2col_step: int,
) -> None:
    """Gradients of :func:`ms_deform_attn_forward`: runs it again and differentiates that.

    Args:
        value (torch.Tensor): As in the forward, and so are the next four and ``im2col_step``.
        value_spatial_shapes (torch.Tensor): See above.
        value_level_start_index (torch.Tensor): See above.
        sampling_locations (torch.Tensor): See above.
        attention_weights (torch.Tensor): See above.
        grad_output (torch.Tensor): Gradient of the output.
        grad_value (torch.Tensor): Buffer that receives the gradient of ``value``.
        grad_sampling_loc (torch.Tensor): Likewise for ``sampling_locations``.
        grad_attn_weight (torch.Tensor): Likewise for ``attention_weights``.
        im2col_step (int): See above.
    """
    import torch

    # mmcv saved plain inputs and runs this without grad mode, so the graph has to be made here.
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in (value, sampling_locations, attention_weights)]
        output = _deformable_attention(inputs[0], value_spatial_shapes, inputs[1], inputs[2])
        grads = torch.autograd.grad(output, inputs, grad_output)
    for buffer, grad in zip((grad_value, grad_sampling_loc, grad_attn_weight), grads, strict=True):
        buffer.copy_(grad)


def sigmoid_focal_loss_forward(
    logits: 'torch.Tensor',
    target: 'torch.Tensor',
    weight: 'torch.Tensor',
    output: 'torch.Tensor',
    *,
    gamma: float,
    alpha: float,
) -> None:
    """Sigmoid focal loss (https://arxiv.org/abs/1708.02002), by elements, in plain PyTorch.

    The loss that mmdet's ``FocalLoss`` asks of mmcv on CUDA; on a CPU it has its own.

    Args:
        logits (torch.Tensor): Shape (samples, classes).
        target (torch.Tensor): Class of each sample, ``classes`` for background; shape (samples,).
        weight (torch.Tensor): Weight of each target class, or an empty tensor for none.
        output (torch.Tensor): Buffer that receives the loss; shape (samples, classes).
        gamma (float): Exponent of the modulating factor.
        alpha (float): Weight of the positive elements; the negative ones have ``1 - alpha``.
    """
    output.copy_(_sigmoid_focal_loss(logits, target, weight, gamma, alpha))


def sigmoid_focal_loss_backward(
    logits: 'torch.Tensor',
    target: 'torch.Tensor',
    weight: 'torch.Tensor',
    grad_logits: 'torch.Tensor',
    *,
    gamma: float,
    alpha: float,
) -> None:
    """Gradient of :func:`sigmoid_focal_loss_forward`, element by element.

    Args:
        logits (torch.Tensor): As in the forward, and so are the others.
        target (torch.Tensor): See above.
        weight (torch.Tensor): See above.
        grad_logits (torch.Tensor): Buffer that receives the gradient of ``logits``.
        gamma (float): See above.
        alpha (float): See above.
    """
    import torch

    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        loss = _sigmoid_focal_loss(logits, target, weight, gamma, alpha).sum()
    grad_logits.copy_(torch.autograd.grad(loss, logits)[0])


def _sigmoid_focal_loss(
    logits: 'torch.Tensor',
    target: 'torch.Tensor',
    weight: 'torch.Tensor',
    gamma: float,
    alpha: float,
) -> 'torch.Tensor':
    from torch.nn import functional

    num_classes = logits.shape[1]
    positive = functional.one_hot(target, num_classes + 1)[:, :num_classes].to(logits.dtype)
    probability = logits.sigmoid()
    miss = (1 - probability) * positive + probability * (1 - positive)
    balance = alpha * positive + (1 - alpha) * (1 - positive)
    entropy = functional.binary_cross_entropy_with_logits(logits, positive, reduction='none')
    loss = balance * miss.pow(gamma) * entropy
    if weight.numel():
        loss = loss * weight[target.clamp(max=num_classes - 1)][:, None]
    return loss


def _deformable_attention(
    value: 'torch.Tensor',
    value_spatial_shapes: 'torch.Tensor',
    sampling_locations: 'torch.Tensor',
    attention_weights: 'torch.Tensor',
) -> 'torch.Tensor':
    import torch
    from mmcv.ops.multi_scale_deform_attn import multi_scale_deformable_attn_pytorch

    # A list costs one device synchronisation instead of several per level.
    shapes = value_spatial_shapes.tolist()
    # A compiled op answers in the dtype of its inputs; autocast would make `sum` answer in fp32.
    with torch.autocast(value.device.type, enabled=False):
        return multi_scale_deformable_attn_pytorch(value, shapes, sampling_locations, attention_weights)


@functools.cache
def _warn_slow_attention() -> None:
    from mmengine.logging import print_log

    print_log(
        'Multi-scale deformable attention runs as plain PyTorch, because the compiled module '
        f'{_EXT_NAME} is missing: it is slower and uses more memory than the compiled op of the '
        'full mmcv.',
        logger='current',
        level=logging.WARNING,
    )


def _build_info_not_available() -> str:
    """What mmcv's ``collect_env`` reports about the compilers of mmcv-lite."""
    return 'n/a'


_WORKING_OPS: dict[str, Callable[..., Any]] = {
    'ms_deform_attn_forward': ms_deform_attn_forward,
    'ms_deform_attn_backward': ms_deform_attn_backward,
    'sigmoid_focal_loss_forward': sigmoid_focal_loss_forward,
    'sigmoid_focal_loss_backward': sigmoid_focal_loss_backward,
    # Not ops: `mmcv.utils.collect_env` asks for them as soon as mmcv.ops can be imported.
    'get_compiler_version': _build_info_not_available,
    'get_compiling_cuda_version': _build_info_not_available,
}
