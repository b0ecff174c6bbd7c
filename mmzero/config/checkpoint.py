"""The config of how checkpoints are written."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mmzero.config.reader import Faults, flag, one_of, option, read_fields


@dataclass(frozen=True)
class CheckpointConfig:
    """Fields of the top-level ``checkpoint``; when to save, and what to keep, ``default_hooks.checkpoint`` says.

    Args:
        format (str): 'full', one ``.pth`` in the OpenMMLab layout, which rank 0 gathers and writes; or 'sharded', a
            folder into which every rank writes its shards, and which any number of ranks at any stage goes on from.
            Defaults to 'full'.
        async_save (bool): Whether a sharded checkpoint is written while training goes on: the loop waits while shards
            are copied to host memory. Defaults to False.
    """

    PLANNED: ClassVar[tuple[str, ...]] = ('export', 'export_dtype')

    format: str = option('full', one_of('full', 'sharded'))
    async_save: bool = option(False, flag)


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
    if config.async_save and config.format == 'full' and not faults.at('checkpoint.format'):
        faults.add('checkpoint.async_save', "needs format='sharded'; a full file is gathered while training waits")
    return config
