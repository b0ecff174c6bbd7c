"""Stage 0: torch's DistributedDataParallel; every rank holds parameters, gradients and optimizer state.

Memory 16a bytes with Adam in fp32, 20a with several micro-batches; 2a elements moved per step times (N-1)/N for any
number of micro-batches, since gradients are synchronised on the last one only.
"""

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm
from typing_extensions import override

from mmzero._compat import ddp_buffer_arguments
from mmzero.engines.averaging import BUCKET_BYTES, average_gradients
from mmzero.engines.forecast import Forecast, is_fine_tuning
from mmzero.engines.materialize import (
    check_same_model,
    materialize_buffers,
    materialize_parameters,
    parameter_slots,
)
from mmzero.engines.param_grads import ParamGradEngine
from mmzero.policies import Gathering, WrapPlan

# DDP's defaults: the first bucket is small, so that reducing starts early.
FIRST_BUCKET_BYTES = 2**20


class DDPEngine(ParamGradEngine):
    """Engine of stage 0."""

    shards = False
    waits_in_backward = True

    @override
    def gathering(self, world_size: int) -> Gathering:
        return Gathering(replicate=world_size, stays=True)

    @override
    def forecast(self, plan: WrapPlan, *, world_size: int, micro_batches: int, state_itemsize: int) -> Forecast:
        trained = sum(unit.trained_numel() for unit in plan.units)
        trained_bytes = sum(unit.trained_bytes() for unit in plan.units)
        stored = sum(unit.gathered_bytes() for unit in plan.units)
        state = trained_bytes * state_itemsize // 4
        # Gradients are views of DDP's buckets, but for what accumulates before the last micro-batch fills these.
        copies = 1 if micro_batches == 1 else 2
        times, per_trained = 4 + state_itemsize + 4 * copies, copies + state_itemsize // 4
        is_partial = is_fine_tuning(plan.units)
        return Forecast(
            memory=dict(parameters=stored, gradients=copies * trained_bytes, optimizer=state),
            formula_bytes=stored + per_trained * trained_bytes if is_partial else plan.numel * times,
            formula=f'p + {per_trained}t; p, t: bytes of all and of trained parameters' if is_partial else f'{times}a',
            moved=2 * trained * (world_size - 1) / world_size,
            formula_moved=2 * plan.numel * (world_size - 1) / world_size,
            moved_formula='2a',
            collectives=dict(all_reduce=_buckets(plan) + self.config.find_unused_parameters),
        )

    @override
    def shard(self, model: nn.Module, plan: WrapPlan) -> None:
        check_same_model(model)
        materialize_buffers(model, self.device)
        self.shard_units(model, plan)

    @override
    def shard_units(self, model: nn.Module, plan: WrapPlan) -> None:
        params = dict(model.named_parameters())
        names = [name for unit in plan.units for name in unit.params]
        materialize_parameters([params[name] for name in names], parameter_slots(model), self.device)
        self.adopt(model, plan.root.name)
        self.averages_at_step = False
        self.module = model.get_submodule(plan.root.name)
        # Not registered as a submodule anywhere: the model keeps its names, and stays the one module tree.
        self._forward = self.module if plan.root.separate else self._replicate(self.module)
        self._trained = self._trains()

    @override
    def let_model_step(self) -> None:
        # [Note: without DDP]
        self.averages_at_step = True
        self._forward = self.module
        self.refuse_where_model_steps('broadcast_buffers', 'static_graph')

    @override
    def finish_gradients(self, only: set[int] | None = None) -> None:
        if self.averages_at_step:
            # Whatever is frozen by now, or no longer: what has no gradient on any rank is left alone.
            own = [param for param in self._named.values() if only is None or id(param) in only]
            average_gradients(own, self.device)

    def _replicate(self, model: nn.Module) -> nn.Module:
        if not any(param.requires_grad for param in model.parameters()):
            return model
        return DistributedDataParallel(
            model,
            device_ids=[self.device] if self.device.type == 'cuda' else None,
            **ddp_buffer_arguments(self.config.broadcast_buffers),
            find_unused_parameters=self.config.find_unused_parameters,
            static_graph=bool(self.config.static_graph),
            # The weights were just broadcast.
            init_sync=False,
            # Else DDP keeps a second copy of all gradients, in its buckets.
            gradient_as_bucket_view=True,
        )

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    @override
    def micro_step(self, is_last: bool) -> None:
        if self.buffers is not None:
            self.buffers.micro_step(is_last)
        if not self.averages_at_step and self._trains() != self._trained:
            # A hook has frozen or unfrozen parameters. DDP averages the gradients of those that it was built with.
            self._trained = self._trains()
            self._forward = self._replicate(self.module)
        if isinstance(self._forward, DistributedDataParallel):
            self._forward.require_backward_grad_sync = is_last

    def _trains(self) -> list[bool]:
        return [param.requires_grad for param in self._named.values()]

    @override
    def total_norm(self, params: list[nn.Parameter], norm_type: float, foreach: bool | None) -> Tensor:
        return get_total_norm([param.grad for param in params if param.grad is not None], norm_type, foreach=foreach)


def _buckets(plan: WrapPlan) -> int:
    """Number of DDP's gradient buckets, which it fills in the reverse order of registration."""
    found = [
        (place, dtype, math.prod(shape) * size)
        for unit in plan.units
        for place, dtype, shape, size, train in zip(
            unit.places, unit.dtypes, unit.shapes, unit.itemsizes, unit.trainable, strict=True
        )
        if train
    ]
    closed: Counter[torch.dtype] = Counter()
    open_bytes: dict[torch.dtype, int] = {}
    for _, dtype, size in sorted(found, key=lambda item: item[0], reverse=True):
        open_bytes[dtype] = open_bytes.get(dtype, 0) + size
        if open_bytes[dtype] >= (BUCKET_BYTES if closed[dtype] else FIRST_BUCKET_BYTES):
            closed[dtype] += 1
            del open_bytes[dtype]
    return sum(closed.values()) + len(open_bytes)
