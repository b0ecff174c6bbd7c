"""Ways to train the same model on the same data: the pair, and what it is measured against."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.model import MMDistributedDataParallel, MMFullyShardedDataParallel
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from mmzero._compat import ddp_buffer_arguments
from mmzero.analysis.by_hand import by_hand
from mmzero.analysis.deepspeed_by_hand import deepspeed_by_hand
from mmzero.analysis.setting import Batch, Setting, Step
from mmzero.engines.fsdp2.stages import STAGES
from mmzero.wrappers import ZeroModelWrapper, ZeroOptimWrapper

PAIR, BY_HAND, FSDP1, DDP = 'pair', 'fully_shard by hand', 'MMFullyShardedDataParallel', 'MMDistributedDataParallel'
DEEPSPEED = 'deepspeed.initialize by hand'
HANDS = dict(fsdp2=BY_HAND, deepspeed=DEEPSPEED)
"""What the pair is held against, by its engine."""


def contestants(setting: Setting) -> dict[str, Step]:
    """Build all of them, each with its own model and optimizer. Collective.

    Args:
        setting (Setting): What they have in common.

    Returns:
        dict[str, Step]: By name, the pair first.
    """
    return {name: make(setting) for name, make in _BY_ENGINE[setting.engine].items()}


def pair(setting: Setting) -> Step:
    """ZeroModelWrapper and ZeroOptimWrapper."""
    return _train_steps(*build_pair(setting))


def build_pair(setting: Setting) -> tuple[ZeroModelWrapper, ZeroOptimWrapper]:
    """Build both. Collective.

    Args:
        setting (Setting): The training.

    Returns:
        tuple[ZeroModelWrapper, ZeroOptimWrapper]: The pair.
    """
    dtype = 'bfloat16' if setting.bf16 else None
    # DeepSpeed has no units.
    units = dict(type='ModuleClassPolicy', classes=[setting.unit.__name__]) if setting.engine == 'fsdp2' else None
    model = ZeroModelWrapper(
        setting.model(),
        stage=setting.stage,
        engine=setting.engine,
        wrap_policy=units,
        precision=dict(param_dtype=dtype),
    )
    return model, ZeroOptimWrapper(setting.optimizer(model), dtype=dtype, **setting.optim_wrapper)


def mmengine_fsdp(setting: Setting) -> Step:
    """MMEngine's wrapper of FSDP1.

    Stages 1 and 2 are one there: MMEngine leaves ``no_sync`` before backward, where FSDP1 looks at it, so that
    gradients are reduced in every micro-batch.
    """
    bf16 = dict(param_dtype='bfloat16', reduce_dtype='float32', cast_root_forward_inputs=True)
    model = MMFullyShardedDataParallel(
        setting.model(),
        sharding_strategy='FULL_SHARD' if STAGES[setting.stage].reshard_after_forward else 'SHARD_GRAD_OP',
        auto_wrap_policy=ModuleWrapPolicy({setting.unit}),
        mixed_precision=bf16 if setting.bf16 else None,
        device_id=setting.device,
    )
    return _train_steps(model, _stock_optim_wrapper(setting, model))


def mmengine_ddp(setting: Setting) -> Step:
    """MMEngine's wrapper of DDP."""
    model = MMDistributedDataParallel(
        setting.model().to(setting.device),
        device_ids=[setting.device] if setting.device.type == 'cuda' else None,
        **ddp_buffer_arguments(False),
    )
    return _train_steps(model, _stock_optim_wrapper(setting, model))


class _AutocastOptimWrapper(OptimWrapper):
    """AmpOptimWrapper for a host without a GPU, which that one refuses."""

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        with super().optim_context(model), torch.autocast('cpu', dtype=torch.bfloat16):
            yield


def _stock_optim_wrapper(setting: Setting, model: nn.Module) -> OptimWrapper:
    optimizer = setting.optimizer(model)
    if not setting.bf16:
        return OptimWrapper(optimizer, **setting.optim_wrapper)
    if setting.device.type == 'cpu':
        return _AutocastOptimWrapper(optimizer, **setting.optim_wrapper)
    return AmpOptimWrapper(optimizer=optimizer, dtype='bfloat16', **setting.optim_wrapper)


def _train_steps(model: Any, optim: OptimWrapper) -> Step:
    def step(batches: Sequence[Batch]) -> list[Tensor]:
        return [model.train_step(batch, optim)['loss'] for batch in batches]

    return step


_BY_ENGINE: dict[str, dict[str, Callable[[Setting], Step]]] = dict(
    fsdp2={PAIR: pair, BY_HAND: by_hand, FSDP1: mmengine_fsdp, DDP: mmengine_ddp},
    deepspeed={PAIR: pair, DEEPSPEED: deepspeed_by_hand, DDP: mmengine_ddp},
)
