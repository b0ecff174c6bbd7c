"""The DeepSpeed engine."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from mmzero.config import LossScale, ZeroConfig
from mmzero.engines.base import Engine, assert_bound
from mmzero.engines.buffers import BufferBroadcast
from mmzero.engines.deepspeed.agreement import check_training
from mmzero.engines.deepspeed.ds_config import ds_config, max_norm, on_disk, with_buffers, with_param_buffers
from mmzero.engines.deepspeed.following import FollowingModules, without_preprocessor
from mmzero.engines.deepspeed.fragments import Fragments
from mmzero.engines.deepspeed.groups import AllGroups
from mmzero.engines.deepspeed.local_parts import FragmentParts
from mmzero.engines.deepspeed.loss_scale import Scaler
from mmzero.engines.deepspeed.optimizer_state import gather_state, load_shards, scatter_state, shards_of_state
from mmzero.engines.deepspeed.package import forget_groups, import_deepspeed, known_local_rank, without_memory_reports
from mmzero.engines.deepspeed.precision import HALF, HalfPrecision, autocast_inside
from mmzero.engines.deepspeed.refusals import (
    check_autocast,
    check_clip,
    check_config,
    check_disk,
    check_model,
    check_optimizer,
)
from mmzero.engines.deepspeed.swap import SwapFolder
from mmzero.engines.deepspeed.swapped import buffers_needed, swap_in_once
from mmzero.engines.deepspeed.weights import Weights, with_whole
from mmzero.engines.gradients import describe_losses
from mmzero.engines.local_parts import LocalParts
from mmzero.engines.loops import Loop
from mmzero.engines.materialize import materialize_model
from mmzero.engines.meeting import meet
from mmzero.engines.named_state import with_numbers
from mmzero.engines.options import Clip, StepOptions, StepOutcome, Training
from mmzero.engines.shard_state import LoadShards
from mmzero.engines.state import group_names
from mmzero.errors import ConfigError, PlanError
from mmzero.policies import WrapPlan, WrapPolicy, build_policy


class DeepSpeedEngine(Engine):
    """Engine of stages 1 to 3 on DeepSpeed.

    [Note: when DeepSpeed partitions]
    ``deepspeed.initialize`` wants model and optimizer together. So ``shard`` only gives every rank rank 0's weights,
    and ``bind`` partitions them: until then each rank holds the whole model, and parameters have the shapes that
    optimizer constructors look at.

    [Note: where DeepSpeed keeps things]
    After ``bind`` the groups hold flat partitions (stages 1 and 2), or nothing between steps (stage 3). The group dicts
    themselves stay, and DeepSpeed reads lr from them at each step. Gradients lie in DeepSpeed's partitions, which its
    step empties; ``param.grad`` is None once backward is over.

    Args:
        config (ZeroConfig): The checked config.
        device (torch.device): Where this rank computes.

    Raises:
        ConfigError: If deepspeed is missing, or fields ask for what is not supported.
    """

    reduces_root = True

    def __init__(self, config: ZeroConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.deepspeed = import_deepspeed(device.type)
        check_config(config, self.deepspeed)
        if config.offload.to_disk:
            check_disk(self.deepspeed)
        self.training = Training()
        # deepspeed's own engine and its ZeRO optimizer, once bound.
        self.runtime: Any = None
        self.zero: Any = None
        self.scaler: Scaler | None = None
        self.half: HalfPrecision | None = None
        self.fragments: Any = None
        self.buffers: BufferBroadcast | None = None
        self._losses: list[Tensor] = []

    @override
    def choose_units(self, model: nn.Module, policy: WrapPolicy) -> WrapPlan:
        # DeepSpeed gathers module by module.
        return build_policy(None)(model)

    @override
    def check_plan(self, model: nn.Module, plan: WrapPlan) -> None:
        check_model(model)

    @override
    def shard(self, model: nn.Module, plan: WrapPlan) -> None:
        materialize_model(model, self.device)
        if self.config.broadcast_buffers:
            self.buffers = BufferBroadcast(model)
        self.weights = Weights(model, self.device)
        self.adopt(model)

    @override
    def check_autocast(self, dtype: torch.dtype | None) -> None:
        check_autocast(dtype, self.config)

    @override
    def check_clip(self, clip: Clip | None) -> None:
        check_clip(clip)

    @override
    def check_training(self, training: Training) -> None:
        check_training(training, self.config)
        self.training = training

    @override
    def bind(self, optimizer: Optimizer, loss_scale: LossScale | None = None) -> Optimizer:
        if self.runtime is not None:
            raise PlanError(
                'DeepSpeed has partitioned the model to be evaluated alone, and cannot train it afterwards; train with '
                "a runner that has not run val() or test() before train(), or use engine='fsdp2'"
            )
        check_optimizer(optimizer)
        self.groups = AllGroups(optimizer)
        if self.config.precision.param_dtype in HALF:
            self.weights.keep_float32()
        self.runtime = self._initialized(optimizer)
        self.zero = self.runtime.optimizer
        self.fragments = Fragments(self.zero, self.device)
        self.weights.partitioned(self.deepspeed, self.fragments)
        if loss_scale is not None and self.half is not None:
            self.scaler = Scaler(self.zero)
        return super().bind(self.groups)

    @override
    def evaluate_only(self) -> None:
        # Below stage 3 parameters are whole on every rank, as they are already.
        if self.runtime is None and self.config.stage == 3:
            self.runtime = self._initialized(None)
            self.weights.partitioned(self.deepspeed, None)

    def _initialized(self, optimizer: Optimizer | None) -> Any:
        """Let DeepSpeed partition the model; without an optimizer it is what it calls ZeRO-Inference."""
        model = self._model()
        settings = ds_config(self.config, model, self.training)
        if optimizer is None:
            # DeepSpeed dies of the second.
            for name in ('offload_optimizer', 'zero_hpz_partition_size'):
                settings['zero_optimization'].pop(name, None)
        if self.config.offload.to_disk:
            self.swap = SwapFolder(str(self.config.offload.nvme_path))
            settings = on_disk(settings, str(self.swap.path))
        if self.config.offload.params == 'nvme':
            settings = with_param_buffers(settings, model, dist.get_world_size())
        if optimizer is not None and self.config.offload.optimizer == 'nvme':
            settings = with_buffers(settings, buffers_needed(optimizer))
        dtype = self.config.precision.param_dtype
        if dtype in HALF:
            self.half = HalfPrecision(model, dtype, self.device.type)
        forget_groups()
        with known_local_rank(self.device), without_memory_reports(), without_preprocessor(model):
            runtime, *_ = self.deepspeed.initialize(
                model=model, optimizer=optimizer, config=settings, dist_init_required=False
            )
        if self.config.offload.params == 'nvme':
            swap_in_once(model)
        return runtime

    @override
    def micro_step(self, is_last: bool) -> None:
        assert_bound(self)
        if self.buffers is not None:
            self.buffers.micro_step(is_last)
        self.runtime.set_gradient_accumulation_boundary(is_last)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.buffers is not None:
            self.buffers.before_forward()
        if self.runtime is None:
            return self._model()(*args, **kwargs)
        with autocast_inside(self._model(), self.device.type):
            return self.runtime(*args, **kwargs)

    @override
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        assert_bound(self)
        self._losses.append(loss.detach())
        # MMEngine has divided it by the number of micro-batches.
        self.runtime.backward(loss, scale_wrt_gas=False, **kwargs)

    @override
    def step(self, options: StepOptions | None = None, **kwargs: Any) -> StepOutcome:
        assert_bound(self)
        options = options or StepOptions()
        check_clip(options.clip)
        if options.parts:
            raise ConfigError(
                [
                    "optim_wrapper.grad_norms: is not supported yet under engine='deepspeed'; leave it out, or use "
                    "engine='fsdp2'"
                ]
            )
        self.zero.clip_grad = max_norm(Training(clip=options.clip))
        try:
            with self.fragments.swapped.gradients():
                self.runtime.step(**kwargs)
            if not self.runtime.was_step_applied():
                return StepOutcome(skipped=self._why_skipped())
            norm = None if options.clip is None else float(self.runtime.get_global_grad_norm())
            return StepOutcome(norm)
        finally:
            self.fragments.forget_gradients()
            self._losses.clear()
            if self.anomalies is not None:
                self.anomalies.clear()

    def _why_skipped(self) -> str:
        why = f'a gradient is not finite, of which DeepSpeed keeps none to look at; {describe_losses(self._losses)}'
        return why if self.anomalies is None else f'{why}; {self.anomalies.describe()}'

    @override
    def reduced_precision(self) -> AbstractContextManager:
        return nullcontext() if self.half is None else self.half.evaluating()

    @override
    @contextmanager
    def following_forwards(self, loop: Loop, present: Sequence[bool]) -> Iterator[Callable[[], None]]:
        if self.runtime is None or self.config.stage < 3:
            # Every rank holds all parameters.
            yield lambda: None
            return
        # Without an optimizer, what keeps the parameters stands in its place.
        keeper = self.runtime.optimizer if self.zero is None else self.zero.parameter_offload
        following = FollowingModules(self._model(), keeper, loop, present)
        with following.noting():
            yield following.follow

    @override
    def local_parts(self) -> LocalParts:
        if self.runtime is None:
            return super().local_parts()
        return FragmentParts(self._model(), self.weights, self.fragments)

    @override
    def refresh(self) -> None:
        if self.zero is not None:
            self.fragments.write_back()

    @override
    def sharded_state(self) -> dict[str, Tensor]:
        return {name: self.weights.shard(tensor) for name, tensor in self._tensors().items()}

    @override
    def state_to_save(self) -> dict[str, Tensor]:
        return with_whole(self.sharded_state(), self.model_state)

    @override
    def model_state(self, only: Collection[str] | None = None) -> dict[str, Tensor]:
        tensors = self._tensors()
        return self.weights.gather(tensors if only is None else {n: t for n, t in tensors.items() if n in only})

    @override
    def load_model_state(self, state: dict[str, Tensor]) -> None:
        self.weights.scatter(self._tensors(), state)

    def _tensors(self) -> dict[str, Any]:
        # The parameters themselves, since a detached one of stage 3 is empty and knows nothing of its partition.
        return self._model().state_dict(keep_vars=True)

    def _model(self) -> nn.Module:
        if self.model is None:
            raise RuntimeError('the engine has sharded no model yet')
        return self.model

    @override
    def optimizer_state(self) -> dict[str, Any]:
        assert_bound(self)
        return gather_state(self.groups, self.fragments, self._group_names())

    @override
    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        assert_bound(self)
        # Before ranks communicate about it.
        meet("load the optimizer's state")
        names = self._group_names()
        scatter_state(self.groups, self.fragments, with_numbers(state, names), names)

    def _group_names(self) -> list[list[str]]:
        return group_names(self.groups.as_of_model(), self.named_params())

    @override
    def optimizer_shards(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        assert_bound(self)
        return shards_of_state(self.groups, self.fragments, self._group_names())

    @override
    def load_optimizer_shards(self, rest: dict[str, Any], load: LoadShards) -> None:
        assert_bound(self)
        load_shards(self.groups, self.fragments, rest, self._group_names(), load)

    @override
    def scaler_state(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state()

    @override
    def load_scaler_state(self, state: dict[str, Any]) -> None:
        if self.scaler is not None:
            self.scaler.load(state)
