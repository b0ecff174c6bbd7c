"""A model whose children are sharded as models of their own; [Note: children that are models of their own]."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from mmzero.config import LossScale, ZeroConfig
from mmzero.engines.anomalies import Anomalies
from mmzero.engines.base import Engine
from mmzero.engines.buffers import BufferBroadcast
from mmzero.engines.loops import Loop
from mmzero.engines.materialize import (
    check_same_model,
    materialize_buffers,
    materialize_parameters,
    parameter_slots,
)
from mmzero.engines.options import Clip, StepOptions, StepOutcome
from mmzero.engines.param_grads import ParamGradEngine
from mmzero.policies import Gathering, WrapPlan, WrapPolicy, of_child, separate_plan, within


class SeparateEngine(Engine):
    """An engine per child that trains; each optimizer is bound to those of its parameters.

    The model's own ``train_step`` calls the children, whose calls are what communicates.

    Args:
        config (ZeroConfig): The checked config.
        device (torch.device): Where this rank computes.
        kind (type[ParamGradEngine]): The engine of each child.
    """

    def __init__(self, config: ZeroConfig, device: torch.device, kind: type[ParamGradEngine]) -> None:
        super().__init__(config, device)
        self.kind = kind
        # What does not depend on the child.
        self._any = kind(config, device)
        self.shards, self.waits_in_backward = kind.shards, kind.waits_in_backward
        self.children: dict[str, ParamGradEngine] = {}
        self._trains = False

    @property
    @override
    def parts(self) -> list[Engine]:
        return [*self.children.values()]

    @property
    def _dtypes(self) -> dict[str, torch.dtype | None]:
        return self.config.separate if isinstance(self.config.separate, dict) else {}

    @override
    def choose_units(self, model: nn.Module, policy: WrapPolicy) -> WrapPlan:
        return separate_plan(model, policy, self._dtypes if self.shards else None)

    @override
    def complete_plan(self, model: nn.Module, plan: WrapPlan) -> WrapPlan:
        return self._any.complete_plan(model, plan)

    @override
    def check_plan(self, model: nn.Module, plan: WrapPlan) -> None:
        self._any.check_plan(model, plan)

    @override
    def gathering(self, world_size: int) -> Gathering:
        return self._any.gathering(world_size)

    @override
    def check_autocast(self, dtype: torch.dtype | None) -> None:
        self._any.check_autocast(dtype)

    @override
    def check_clip(self, clip: Clip | None) -> None:
        self._any.check_clip(clip)

    @override
    def shard(self, model: nn.Module, plan: WrapPlan) -> None:
        check_same_model(model)
        materialize_buffers(model, self.device)
        self.anomalies = Anomalies(model) if self.config.detect_anomaly else None
        params, slots = dict(model.named_parameters()), parameter_slots(model)
        materialize_parameters([params[name] for name in plan.root.params], slots, self.device)
        for name in [unit.name for unit in plan.units if unit.separate]:
            engine = self.kind(self._config_of(name), self.device)
            engine.shard_units(model, within(plan, name))
            engine.let_model_step()
            engine.anomalies = self.anomalies
            if self.config.broadcast_buffers:
                engine.buffers = self._broadcasting(model.get_submodule(name))
            self.children[name] = engine
        # One of them watches for all: which is called when is the model's business.
        self._first.watch_over(model, replace(plan, units=plan.units[:-1]))
        self.model = model

    def _config_of(self, name: str) -> ZeroConfig:
        dtypes, precision = self._dtypes, self.config.precision
        dtype = of_child(name, dtypes, precision.param_dtype)
        # A child has no forward through its engine: its own broadcasts.
        return replace(self.config, precision=replace(precision, param_dtype=dtype), broadcast_buffers=False)

    def _broadcasting(self, child: nn.Module) -> BufferBroadcast:
        """Broadcast a child's buffers before its own forwards of training, as the DDP around it would."""
        buffers = BufferBroadcast(child)

        def before_forward(*_: Any) -> None:
            # In val ranks may have different numbers of batches.
            if self._trains:
                buffers.before_forward()

        child.register_forward_pre_hook(before_forward, prepend=True)
        return buffers

    @property
    def _first(self) -> ParamGradEngine:
        return next(iter(self.children.values()))

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)  # type: ignore[misc]

    @override
    def micro_step(self, is_last: bool) -> None:
        for engine in self.children.values():
            engine.micro_step(is_last)

    @override
    def bind(self, optimizer: Optimizer, loss_scale: LossScale | None = None) -> Optimizer:
        raise RuntimeError('optimizers are bound to the engines of the children that hold their parameters')

    @override
    def step(self, options: StepOptions | None = None, **kwargs: Any) -> StepOutcome:
        raise RuntimeError('each optimizer steps by itself')

    @override
    def refresh(self) -> None:
        for engine in self.children.values():
            engine.refresh()

    @override
    @contextmanager
    def watching(self, kind: str) -> Iterator[Callable[[Any], None]]:
        self._trains = kind == 'train'
        try:
            with self._first.watching(kind) as check:
                yield check
        finally:
            self._trains = False

    @override
    def following_forwards(self, loop: Loop, present: Sequence[bool]) -> AbstractContextManager[Callable[[], None]]:
        return self._first.following_forwards(loop, present)

    @override
    def without_gradients(self) -> AbstractContextManager:
        return _in_all(engine.without_gradients() for engine in self.children.values())

    @override
    def reduced_precision(self) -> AbstractContextManager:
        return _in_all(engine.reduced_precision() for engine in self.children.values())


@contextmanager
def _in_all(contexts: Iterable[AbstractContextManager]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
