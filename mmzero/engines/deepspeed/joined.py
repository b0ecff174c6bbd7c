"""Weights out of a checkpoint that DeepSpeed has written itself, by DeepSpeed's own function."""

import contextlib
import importlib
import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmzero.engines.deepspeed.package import import_deepspeed

_PICKLED = (
    ('runtime.zero.config', ('ZeroStageEnum',)),
    ('runtime.fp16.loss_scaler', ('LossScaler', 'DynamicLossScaler')),
    ('utils.tensor_fragment', ('fragment_address',)),
)
"""Modules of deepspeed and those of their classes whose objects it pickles beside tensors."""


def joined_weights(folder: Path, device_type: str) -> dict[str, Tensor]:
    """Join the float32 weights of all ranks. On one rank, where ``torch.load`` reads known classes only.

    Source: ``deepspeed.utils.zero_to_fp32``, which is what DeepSpeed copies beside a checkpoint.

    Memory: files are mapped; below stage 3 two copies of the weights at the peak, at stage 3 one.

    Args:
        folder (Path): That of a tag, with files of every rank.
        device_type (str): 'cpu' or 'cuda', on which deepspeed computes in this process.

    Returns:
        dict[str, Tensor]: Trained and frozen parameters and buffers by name.

    Raises:
        ConfigError: If deepspeed is not installed.
        Exception: Whatever deepspeed raises of a folder that lacks a file of a rank.
    """
    import_deepspeed(device_type)
    classes = [getattr(_module(path), name) for path, names in _PICKLED for name in names]
    with torch.serialization.safe_globals(classes), contextlib.redirect_stdout(io.StringIO()):
        lazy = _module('utils.zero_to_fp32').get_fp32_state_dict_from_zero_checkpoint(
            str(folder.parent), tag=folder.name, lazy_mode=True
        )
        return {name: tensor.contiguous() for name, tensor in lazy.items()}


def _module(path: str) -> Any:
    return importlib.import_module(f'deepspeed.{path}')
