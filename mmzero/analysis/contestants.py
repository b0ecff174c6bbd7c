"""Four ways to train the same model on the same data: the pair, and what it is measured against."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from mmengine.model import BaseModel, MMDistributedDataParallel, MMFullyShardedDataParallel
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mmzero._compat import ddp_buffer_arguments
from mmzero.engines.fsdp2.stages import STAGES
from mmzero.wrappers import ZeroModelWrapper, ZeroOptimWrapper

Batch = dict[str, Tensor]
Step = Callable[[Sequence[Batch]], list[Tensor]]
"""One optimizer step: micro-batches to their losses."""

PAIR, BY_HAND, FSDP1, DDP = 'pair', 'fully_shard by hand', 'MMFullyShardedDataParallel', 'MMDistributedDataParallel'


@dataclass(frozen=True)
class Setting:
    """What all contestants have in common.

    Args:
        build (Callable[[], BaseModel]): Builds the model, from the seed that is set.
        unit (type[nn.Module]): The class of the units.
        device (torch.device): Where this rank computes.
        stage (int): ZeRO stage, 1 to 3. Defaults to 3.
        accumulation (int): Micro-batches per optimizer step. Defaults to 1.
        bf16 (bool): Units in bfloat16 under autocast. Defaults to False.
        max_norm (float): Gradients are clipped to it. Defaults to 1.
    """

    build: Callable[[], BaseModel]
    unit: type[nn.Module]
    device: torch.device
    stage: int = 3
    accumulation: int = 1
    bf16: bool = False
    max_norm: float = 1.0

    def model(self) -> BaseModel:
        """Build the model: the same one each time."""
        torch.manual_seed(0)
        return self.build().train()

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Build AdamW on the parameters of a model."""
        return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05)

    def autocast(self) -> AbstractContextManager:
        """The context of a forward."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self.bf16 else nullcontext()

    @property
    def optim_wrapper(self) -> dict[str, Any]:
        """Arguments of MMEngine's optimizer wrappers."""
        return dict(accumulative_counts=self.accumulation, clip_grad=dict(max_norm=self.max_norm))


def contestants(setting: Setting) -> dict[str, Step]:
    """Build all of them, each with its own model and optimizer. Collective.

    Args:
        setting (Setting): What they have in common.

    Returns:
        dict[str, Step]: By name, the pair first.
    """
    return {
        PAIR: pair(setting),
        BY_HAND: by_hand(setting),
        FSDP1: mmengine_fsdp(setting),
        DDP: mmengine_ddp(setting),
    }


def pair(setting: Setting) -> Step:
    """ZeroModelWrapper and ZeroOptimWrapper."""
    dtype = 'bfloat16' if setting.bf16 else None
    model = ZeroModelWrapper(
        setting.model(),
        stage=setting.stage,
        wrap_policy=dict(type='ModuleClassPolicy', classes=[setting.unit.__name__]),
        precision=dict(param_dtype=dtype),
    )
    optim = ZeroOptimWrapper(setting.optimizer(model), dtype=dtype, **setting.optim_wrapper)
    return _train_steps(model, optim)


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


def by_hand(setting: Setting) -> Step:
    """What an expert writes with torch alone, for this model and setting.

    The same units, rules of the stage and precision as the pair's; nothing is decided while it runs. Like MMEngine's
    loop it reads the gradient norm of each step for the log, and leaves the loss where it is.
    """
    model, k = setting.model().to(setting.device), setting.accumulation
    rules = STAGES[setting.stage]
    _shard_by_hand(setting, model)
    optimizer = setting.optimizer(model)
    norms = []

    def step(batches: Sequence[Batch]) -> list[Tensor]:
        losses = []
        for index, batch in enumerate(batches, 1):
            if k > 1:
                model.set_requires_gradient_sync(index == k or rules.sync_every_micro_step)  # type: ignore[operator]
                if rules.keep_gathered:
                    model.set_reshard_after_backward(index == k)  # type: ignore[operator]
            data = {name: tensor.to(setting.device, non_blocking=True) for name, tensor in batch.items()}
            with setting.autocast():
                loss = model(**data, mode='loss')['loss']
            (loss / k if k > 1 else loss).backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), setting.max_norm)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return step


def _shard_by_hand(setting: Setting, model: nn.Module) -> None:
    mesh = init_device_mesh(setting.device.type, (dist.get_world_size(),))
    reshard = STAGES[setting.stage].reshard_after_forward
    for module in [*model.modules()][::-1]:
        if module is not model and not isinstance(module, setting.unit):
            continue
        precision = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if setting.bf16 and module is not model else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=setting.device.type == 'cpu',
        )
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=precision)
