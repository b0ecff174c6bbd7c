"""The DeepSpeed engine."""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from mmzero.config import LossScale, ZeroConfig
from mmzero.engines.base import Engine, assert_bound
from mmzero.engines.deepspeed.ds_config import ds_config
from mmzero.engines.deepspeed.package import import_deepspeed, known_local_rank
from mmzero.engines.deepspeed.refusals import check_autocast, check_clip, check_config, check_model
from mmzero.engines.materialize import materialize_model
from mmzero.engines.options import Clip, StepOptions, StepOutcome
from mmzero.engines.state import gather_tensors, scatter_tensors
from mmzero.errors import CheckpointError, ConfigError
from mmzero.policies import WrapPlan


class DeepSpeedEngine(Engine):
    """Engine of stages 1 to 3 on DeepSpeed, in float32.

    [Note: when DeepSpeed partitions]
    ``deepspeed.initialize`` wants model and optimizer together. So ``shard`` only gives every rank rank 0's weights,
    and ``bind`` partitions them: until then each rank holds the whole model, and parameters have the shapes that
    optimizer constructors look at.

    [Note: where DeepSpeed keeps things]
    After ``bind`` the optimizer's groups hold flat partitions (stages 1 and 2), or nothing between steps (stage 3). The
    group dicts themselves stay, and DeepSpeed reads lr from them at each step. Gradients lie in DeepSpeed's partitions,
    which its step empties; ``param.grad`` is None once backward is over.

    Args:
        config (ZeroConfig): The checked config.
        device (torch.device): Where this rank computes.

    Raises:
        ConfigError: If deepspeed is missing, or fields ask for what is not supported.
    """

    def __init__(self, config: ZeroConfig, device: torch.device) -> None:
        super().__init__(config, device)
        check_config(config)
        self.deepspeed = import_deepspeed(device.type)
        # deepspeed's own engine and its ZeRO optimizer, once bound.
        self.runtime: Any = None
        self.zero: Any = None

    @override
    def check_plan(self, model: nn.Module, plan: WrapPlan) -> None:
        check_model(model)

    @override
    def shard(self, model: nn.Module, plan: WrapPlan) -> None:
        materialize_model(model, self.device)
        self.adopt(model)

    @override
    def check_autocast(self, dtype: torch.dtype | None) -> None:
        check_autocast(dtype)

    @override
    def check_clip(self, clip: Clip | None) -> None:
        check_clip(clip)

    @override
    def bind(self, optimizer: Optimizer, loss_scale: LossScale | None = None) -> Optimizer:
        model = self._model()
        for group in optimizer.param_groups:
            # DeepSpeed drops empty groups by itself, and fails on one whose parameters are all frozen.
            group['params'] = [param for param in group['params'] if param.requires_grad]
        with known_local_rank(self.device):
            self.runtime, self.zero, *_ = self.deepspeed.initialize(
                model=model, optimizer=optimizer, config=ds_config(self.config, model), dist_init_required=False
            )
        return super().bind(optimizer)

    @override
    def micro_step(self, is_last: bool) -> None:
        assert_bound(self)
        self.runtime.set_gradient_accumulation_boundary(is_last)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.runtime or self._model())(*args, **kwargs)

    @override
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        assert_bound(self)
        self.runtime.backward(loss, **kwargs)

    @override
    def step(self, options: StepOptions | None = None, **kwargs: Any) -> StepOutcome:
        assert_bound(self)
        options = options or StepOptions()
        clip = options.clip
        check_clip(clip)
        if options.parts:
            raise ConfigError(
                [
                    "optim_wrapper.grad_norms: is not supported yet under engine='deepspeed'; leave it out, or use "
                    "engine='fsdp2'"
                ]
            )
        self.zero.clip_grad = 0.0 if clip is None else float(clip.options['max_norm'])
        self.runtime.step(**kwargs)
        return StepOutcome(None if clip is None else float(self.runtime.get_global_grad_norm()))

    @override
    def sharded_state(self) -> dict[str, Tensor]:
        # The parameters themselves, since a detached one of stage 3 is empty and knows nothing of its partition.
        return self._model().state_dict(keep_vars=True)

    @override
    def model_state(self, only: Collection[str] | None = None) -> dict[str, Tensor]:
        return gather_tensors(self._state_of(only), self._whole)

    @override
    def load_model_state(self, state: dict[str, Tensor]) -> None:
        scatter_tensors(self.sharded_state(), state, partial(self._whole, modifier_rank=0))
        if self.zero is not None:
            # The optimizer steps on its own flat copy, which would overwrite what was loaded.
            self.zero.refresh_fp32_params()

    def _whole(self, tensor: Any, modifier_rank: int | None = None) -> AbstractContextManager:
        if not hasattr(tensor, 'ds_id'):
            return nullcontext()
        return self.deepspeed.zero.GatheredParameters([tensor], modifier_rank=modifier_rank)

    def _model(self) -> nn.Module:
        if self.model is None:
            raise RuntimeError('the engine has sharded no model yet')
        return self.model

    @override
    def optimizer_state(self) -> dict[str, Any]:
        raise CheckpointError(
            "default_hooks.checkpoint.save_optimizer: the optimizer's state cannot be saved yet under "
            "engine='deepspeed'; set save_optimizer=False, or use engine='fsdp2'"
        )

    @override
    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        raise CheckpointError(
            "resume: the optimizer's state cannot be loaded yet under engine='deepspeed'; use load_from without "
            "resume, or engine='fsdp2'"
        )
