"""Keeping the outputs of the expensive operators in a recomputed region (``save='matmuls'``)."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

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

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator not in SAVED_OPERATORS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if see is not None and not context.is_recompute:
            see(context.op_output)
        return CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)


def out_of_place(region: nn.Module) -> list[Undo]:
    """Let activations write into new memory, since in place they would overwrite outputs that are kept.

    mmcv's FFN has an in-place ReLU after a linear layer, where torch would refuse ("has been mutated").

    Args:
        region (nn.Module): What is recomputed.

    Returns:
        list[Callable]: What takes the changes back.
    """
    return [
        set_attribute(layer, 'inplace', False) for layer in region.modules() if getattr(layer, 'inplace', False) is True
    ]
