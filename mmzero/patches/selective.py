"""Keeping the outputs of the expensive operators in a recomputed region (``save='matmuls'``)."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from mmzero._compat import TorchDispatchMode
from mmzero.patches.patch import Undo, set_attribute

_NAMES = (
    'mm',
    'addmm',
    'bmm',
    'baddbmm',
    'convolution',
    '_scaled_dot_product_attention_math_for_mps',
    '_scaled_dot_product_cudnn_attention',
    '_scaled_dot_product_efficient_attention',
    '_scaled_dot_product_flash_attention',
    '_scaled_dot_product_flash_attention_for_cpu',
    '_scaled_dot_product_fused_attention_overrideable',
)

SAVED_OPERATORS = frozenset(getattr(torch.ops.aten, name).default for name in _NAMES if hasattr(torch.ops.aten, name))
"""Operators of ATen whose outputs are kept: matrix products, convolutions and fused attention."""


def keeping_matmuls(
    see: Callable[[Any], None] | None = None,
) -> tuple[AbstractContextManager, AbstractContextManager]:
    """The contexts of a forward and of its recompute that keep what :data:`SAVED_OPERATORS` return.

    Stands on ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.

    Args:
        see (Callable, optional): Is given what forward keeps so. Defaults to None.

    Returns:
        tuple: Two contexts.
    """

    def choose(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        choice = _policy(context, operator, *args, **kwargs)
        if see is not None and choice is CheckpointPolicy.MUST_SAVE and not context.is_recompute:
            see(context.op_output)
        return choice

    keeping, using = create_selective_checkpoint_contexts(choose)
    return _OfSaved(keeping), _OfSaved(using)


class _OfSaved(TorchDispatchMode):
    """Shows torch's mode the operators that may be kept.

    It refuses a recompute that runs any operator more often than the forward did. Sharding does so rightly: what is
    gathered already in forward may have to be gathered for the recompute.

    Args:
        mode (TorchDispatchMode): What keeps, or uses what was kept.
    """

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self._mode = mode

    def __enter__(self) -> Any:
        # What it counts is counted anew in each backward; of torch's mode itself nothing stays entered.
        with self._mode:
            pass
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func not in SAVED_OPERATORS:
            return func(*args, **(kwargs or {}))
        try:
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        except RuntimeError as error:
            if 'has been mutated' not in str(error):
                raise
            # Its memory was overwritten, by the region itself or by who got it.
            return func(*args, **(kwargs or {}))


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keeps = operator in SAVED_OPERATORS and not _draws(operator, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _draws(operator: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether attention drops out: were it skipped, what is recomputed after it would draw other random numbers."""
    names = [argument.name for argument in operator._schema.arguments]
    return bool(dict(zip(names, args, strict=False), **kwargs).get('dropout_p'))


def out_of_place(region: nn.Module) -> list[Undo]:
    """Let activations write into new memory, since in place they would overwrite what is kept.

    That is what the region gets, or outputs of its operators: mmcv's FFN has an in-place ReLU after a linear layer.
    torch refuses both ("has been modified by an inplace operation", "has been mutated"). Nothing is kept longer for it.

    Args:
        region (nn.Module): What is recomputed.

    Returns:
        list[Callable]: What takes the changes back.
    """
    return [
        set_attribute(layer, 'inplace', False) for layer in region.modules() if getattr(layer, 'inplace', False) is True
    ]
