"""The FSDP2 engine."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from mmengine.logging import print_log
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from typing_extensions import override

from mmzero._compat import (
    DoubleBackward,
    before_phases,
    keep_requires_grad,
    reduce_in_one_dtype,
    reduce_root_last,
    return_freed_memory,
    set_reduce_scatter_unused_params,
)
from mmzero.engines.buffers import BufferBroadcast
from mmzero.engines.cpu_norms import teach_autocast_norms
from mmzero.engines.evaluation import units_alone_in
from mmzero.engines.forecast import Forecast
from mmzero.engines.fsdp2.clip import total_norm
from mmzero.engines.fsdp2.completion import keep_fp32, keep_whole
from mmzero.engines.fsdp2.first_iterations import FirstIterations
from mmzero.engines.fsdp2.following import Following
from mmzero.engines.fsdp2.forecast import forecast
from mmzero.engines.fsdp2.host_step import few_threads, step_on_host
from mmzero.engines.fsdp2.kinds import by_kind
from mmzero.engines.fsdp2.methods import check_methods, enter_by_methods
from mmzero.engines.fsdp2.prefetch import ForwardPrefetch
from mmzero.engines.fsdp2.replicated import ReplicatedParameters
from mmzero.engines.fsdp2.stages import rules_of
from mmzero.engines.fsdp2.trial import ELEMENTWISE, choose_view
from mmzero.engines.fsdp2.unit_rules import UnitSharding, reduced_dtype, shard_unit, unit_layouts
from mmzero.engines.fsdp2.unused import UnusedParameters
from mmzero.engines.loops import Loop
from mmzero.engines.materialize import (
    check_same_model,
    materialize_buffers,
    parameter_slots,
)
from mmzero.engines.param_grads import ParamGradEngine
from mmzero.engines.process_group import ranks_per_node
from mmzero.engines.watch import TRAIL
from mmzero.errors import ConfigError, PlanError
from mmzero.policies import Gathering, WrapPlan

OFFLOADED = (
    'offload: shards of parameters, their gradients and optimizer state lie in host memory; an optimizer steps where '
    'its parameters are, so that the three go together'
)


class FSDP2Engine(ParamGradEngine):
    """Engine of stages 1 to 3: ``torch.distributed.fsdp.fully_shard`` on every unit, then on the root."""

    @override
    def complete_plan(self, model: nn.Module, plan: WrapPlan) -> WrapPlan:
        plan = keep_whole(model, keep_fp32(model, plan, self.config))
        return replace(plan, notes=(*plan.notes, OFFLOADED)) if self.config.offload.to_host else plan

    @override
    def check_plan(self, model: nn.Module, plan: WrapPlan) -> None:
        if plan.faults:
            raise PlanError('; '.join(why for _, why in plan.faults))
        for unit in plan.units:
            check_methods(model.get_submodule(unit.name), unit)

    @override
    def gathering(self, world_size: int) -> Gathering:
        stays = not rules_of(self.config).reshard_after_forward
        return Gathering(*self.config.mesh.sizes(world_size), self.config.precision.param_dtype, stays)

    @override
    def forecast(self, plan: WrapPlan, *, world_size: int, micro_batches: int, state_itemsize: int) -> Forecast:
        return forecast(
            unit_layouts(plan, self.config, world_size),
            rules_of(self.config),
            world_size=world_size,
            micro_batches=micro_batches,
            state_itemsize=state_itemsize,
            find_unused=self.config.find_unused_parameters,
        )

    @override
    def shard(self, model: nn.Module, plan: WrapPlan) -> None:
        check_same_model(model)
        materialize_buffers(model, self.device)
        self.shard_units(model, plan)

    @override
    def shard_units(self, model: nn.Module, plan: WrapPlan) -> None:
        # Only now every rank knows what is frozen.
        plan = keep_whole(model, plan)
        self.rules = rules_of(self.config)
        sharding = UnitSharding(self.config, self.device)
        slots = parameter_slots(model)
        params = dict(model.named_parameters())
        whole: list[nn.Parameter] = []
        for unit in plan.units:
            module, own = model.get_submodule(unit.name), [params.pop(name) for name in unit.params]
            whole += shard_unit(sharding, module, unit, own, slots, whole)
            return_freed_memory()
        root = model.get_submodule(plan.root.name)
        if not isinstance(root, FSDPModule):
            raise RuntimeError('fully_shard left the model as it was')
        self.root: FSDPModule = root
        self.units: list[Any] = [model.get_submodule(unit.name) for unit in plan.units[:-1]]
        dtypes = {unit: dtype for unit in plan.units if (dtype := reduced_dtype(unit, self.config)) is not None}
        self.reduced = [(model.get_submodule(unit.name), dtype, unit.methods) for unit, dtype in dtypes.items()]
        if self.reduced and self.device.type == 'cpu':
            teach_autocast_norms()
        self.replicated = ReplicatedParameters(whole)
        self.unused = self._unused(model, plan)
        if self.reduced and not self.rules.sync_every_micro_step:
            reduce_in_one_dtype(self.root, zeros=self.unused is not None)
        for unit in plan.units:
            watch = self.unused.watchers[unit.name] if self.unused is not None else None
            enter_by_methods(model.get_submodule(unit.name), unit.methods, watch)
        reduce_root_last(self.root)
        self.first_iterations = FirstIterations(model, plan)
        self._note_places(model, plan)
        self.prefetch = ForwardPrefetch(self.units)
        self.following: Following | None = None
        self.double_backward = DoubleBackward(self.root)
        if self.config.broadcast_buffers:
            self.buffers = BufferBroadcast(model)
        self.model_steps = False
        self.adopt(model, plan.root.name)

    def _note_places(self, model: nn.Module, plan: WrapPlan) -> None:
        for unit in plan.units:
            module: Any = model.get_submodule(unit.name)
            before_phases(module, partial(_come_to, f'of the unit {unit.name or "(root)"} ({unit.class_name})'))

    def _unused(self, model: nn.Module, plan: WrapPlan) -> UnusedParameters | None:
        if not self.config.find_unused_parameters:
            return None
        set_reduce_scatter_unused_params(self.root)
        return UnusedParameters(model, plan, self.device)

    @override
    def watch_over(self, model: nn.Module, plan: WrapPlan) -> None:
        self.first_iterations = FirstIterations(model, plan)

    @override
    def let_model_step(self) -> None:
        if self.model_steps:
            return
        self.refuse_where_model_steps('broadcast_buffers')
        self.model_steps = True
        # An optimizer may step between two units, and what was gathered ahead would be old.
        self.prefetch.turn_off()
        keep_requires_grad(self.root)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.buffers is not None:
            self.buffers.before_forward()
        return self.root(*args, **kwargs)  # type: ignore[operator]

    @override
    def micro_step(self, is_last: bool) -> None:
        if self.buffers is not None:
            self.buffers.micro_step(is_last)
        # Unit by unit: what FSDP2 does by itself walks all modules of the model, in every micro-batch.
        for module in (*self.units, self.root):
            syncs = is_last or self.is_shared or self.rules.sync_every_micro_step
            module.set_requires_gradient_sync(syncs, recurse=False)
            if self.rules.keep_gathered:
                module.set_reshard_after_backward(is_last, recurse=False)

    @override
    def check_autocast(self, dtype: torch.dtype | None) -> None:
        for index, entry in enumerate(self.config.overrides):
            if entry.param_dtype not in (None, torch.float32, dtype):
                raise ConfigError(
                    [
                        f'model_wrapper_cfg.overrides[{index}].param_dtype: units gathered in {entry.param_dtype} are '
                        f'computed under autocast to it, which is {"off" if dtype is None else f"to {dtype}"}; set '
                        'optim_wrapper.dtype to the same dtype, or pass --amp for bfloat16'
                    ]
                )
        reduced = dtype not in (None, torch.float32)
        # Asked before sharding, too: the check of a config does.
        rules = rules_of(self.config)
        if reduced and rules.reshard_after_forward and self.config.precision.param_dtype != dtype:
            raise ConfigError(
                [
                    f'model_wrapper_cfg.precision.param_dtype: autocast to {dtype} over units gathered in '
                    f'{self.config.precision.param_dtype or "their own dtype"} keeps a 16-bit copy of every weight '
                    'until backward, which undoes stage 3; set precision=dict(param_dtype=...) to the same dtype '
                    '(ZeroRunner does it by itself), or use stage 2'
                ]
            )

    @override
    def step_of(self, optimizer: Optimizer) -> Callable[..., Any]:
        view = choose_view(optimizer)
        said = [view.costs] if view.costs else []
        if self.config.offload.to_host and (slow := few_threads(ranks_per_node() or 1)) is not None:
            said.append(slow)
        if type(optimizer) not in ELEMENTWISE:
            said.insert(
                0,
                f'stepped stand-ins for its parameters as without sharding when it is shown {view.name}; what it does '
                'on rare occasions only no trial sees (docs/optimizers.md has those that were trained)',
            )
        for text in said if dist.get_rank() == 0 else ():
            print_log(f'optim_wrapper.optimizer: {type(optimizer).__name__} {text}', 'current')
        step = partial(view.step, optimizer)
        return partial(step_on_host, step, optimizer) if self.config.offload.to_host else step

    @override
    def kinds(self, params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        return by_kind(params)

    @override
    def total_norm(self, params: list[nn.Parameter], norm_type: float, foreach: bool | None) -> Tensor:
        return total_norm(params, norm_type, foreach)

    @override
    def finish_gradients(self, only: set[int] | None = None) -> None:
        self.double_backward.reduce_the_rest()
        self.replicated.reduce_gradients(only)
        if self.unused is not None:
            self.unused.drop_zeros(only)

    @override
    def after_step(self) -> None:
        # What a forward without a backward left gathered, or a penalty, would compute with old weights.
        if self.double_backward.release() or self.model_steps:
            self.refresh()

    @override
    def refresh(self) -> None:
        for module in (*self.units, self.root):
            module.reshard()

    @override
    @contextmanager
    def watching(self, kind: str) -> Iterator[Callable[[Any], None]]:
        prefetching = self.prefetch.training() if kind == 'train' else nullcontext()
        with prefetching, self.first_iterations.watch(kind, self.following) as check:
            yield check

    @override
    @contextmanager
    def following_forwards(self, loop: Loop, present: Sequence[bool]) -> Iterator[Callable[[], None]]:
        self.first_iterations.prepare(loop.kind)
        before, self.following = self.following, Following(self.first_iterations.modules, loop, present)
        try:
            with self.following.noting():
                yield self.following.follow
            self.first_iterations.done_by_others(loop.kind, self.following)
        finally:
            self.following = before

    @override
    def without_gradients(self) -> AbstractContextManager:
        return nullcontext() if self.unused is None else self.unused.not_noting()

    @override
    def reduced_precision(self) -> AbstractContextManager:
        return units_alone_in(self.reduced, self.device.type) if self.reduced else nullcontext()


def _come_to(unit: str, phase: str) -> None:
    TRAIL.come_to(f'the {phase} {unit}')
