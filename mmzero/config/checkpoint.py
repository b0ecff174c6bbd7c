"""The config of how checkpoints are written."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mmzero.config.reader import Faults, flag, one_of, option, optional_dtype, read_fields


@dataclass(frozen=True)
class CheckpointConfig:
    """Fields of the top-level ``checkpoint``; when to save, and what to keep, ``default_hooks.checkpoint`` says.

    Args:
        format (str): 'full', one ``.pth`` in the OpenMMLab layout, which rank 0 gathers and writes; or 'sharded', a
            folder into which every rank writes its shards, and which any number of ranks at any stage goes on from.
            Defaults to 'full'.
        async_save (bool): Whether a sharded checkpoint is written while training goes on: the loop waits while shards
            are copied to host memory. Defaults to False.
        export (str, optional): Of which sharded checkpoints a ``.pth`` in the OpenMMLab layout, with weights and meta
            data, is written beside: 'last' or 'best' at the end of training, or 'all' as they are saved. Defaults to
            None: of none.
        export_dtype (torch.dtype): Of floating weights there. Defaults to float32.
    """

    format: str = option('full', one_of('full', 'sharded'))
    async_save: bool = option(False, flag)
    export: str | None = option(None, one_of(None, 'last', 'best', 'all'))
    export_dtype: torch.dtype | None = option(torch.float32, optional_dtype)


def read_checkpoint_config(value: Any, faults: Faults) -> CheckpointConfig:
    """Read ``checkpoint``.

    Args:
        value (Any): Its value. What is no dict is a variable of the user's: stock configs keep a URL there.
        faults (Faults): Takes what is wrong.

    Returns:
        CheckpointConfig: The config, with defaults where a field has a fault.
    """
    if not isinstance(value, Mapping):
        return CheckpointConfig()
    config = read_fields(CheckpointConfig, dict(value), 'checkpoint', faults)
    if config.format == 'full' and not faults.at('checkpoint.format'):
        if config.async_save:
            faults.add('checkpoint.async_save', "needs format='sharded'; a full file is gathered while training waits")
        for name in ('export', 'export_dtype'):
            if getattr(config, name) != getattr(CheckpointConfig, name):
                faults.add(f'checkpoint.{name}', "is for format='sharded'; a full file is a .pth already")
    elif config.export is None and config.export_dtype != CheckpointConfig.export_dtype:
        faults.add('checkpoint.export_dtype', "is for export, which is not set; give export='last', 'best' or 'all'")
    return config
