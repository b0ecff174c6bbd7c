"""Optimizers and engines where there are several of either.

[Note: several optimizers]
An engine has one optimizer by itself. One that holds parameters of several children (an encoder and a decoder), or a
part of the parameters of one (a backbone; another one has the head), steps through a :class:`Share`: it has an
accumulation, a clipping and a loss scale of its own, and completes the gradients of its own parameters alone. Where
optimizers share an engine, their micro-batches are not the same, so that gradients are synchronised after each of them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from mmzero.engines.base import Engine, engines_of
from mmzero.engines.options import Clip
from mmzero.engines.param_grads import ParamGradEngine
from mmzero.policies import WrapPlan


def engine_for(params: Iterable[nn.Parameter]) -> Engine:
    """Find what steps some parameters.

    Args:
        params (Iterable[nn.Parameter]): Those of an optimizer that will be bound to it.

    Returns:
        Engine: The engine that sharded them, where it has no optimizer for others; else a share of it, or of several.

    Raises:
        ConfigError: As :func:`mmzero.engines.base.engines_of`.
    """
    own = list(params)
    engines = engines_of(own)
    first, ids = engines[0], {id(param) for param in own}
    if len(engines) == 1 and (first.optimizer is None or not _apart(first.optimizer, ids)):
        return first
    return Share(engines, ids)  # type: ignore[arg-type]


def _apart(optimizer: Optimizer, ids: set[int]) -> bool:
    return all(id(param) not in ids for group in optimizer.param_groups for param in group['params'])


class Share(ParamGradEngine):
    """What one optimizer has of the engines that sharded its parameters.

    Args:
        engines (Sequence[ParamGradEngine]): The engines, in the same order on every rank.
        ids (set[int]): ``id`` of the optimizer's parameters.
    """

    is_shared = True

    def __init__(self, engines: Sequence[ParamGradEngine], ids: set[int]) -> None:
        super().__init__(engines[0].config, engines[0].device)
        self.engines = list(engines)
        self.shards = engines[0].shards
        self.model = engines[0].model
        self.anomalies = engines[0].anomalies
        for engine in engines:
            theirs = [param for param in engine.named_params().values() if param.requires_grad]
            holds_all = all(id(param) in ids for param in theirs)
            engine.is_shared = engine.is_shared or engine.optimizer is not None or not holds_all

    @property
    @override
    def parts(self) -> list[Engine]:
        return [*self.engines]

    @override
    def shard(self, model: nn.Module, plan: WrapPlan) -> None:
        raise RuntimeError('a share of engines has nothing to shard; its engines have')

    shard_units = shard

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError('a share of engines has no forward; the model calls its children')

    @override
    def micro_step(self, is_last: bool) -> None:
        for engine in self.engines:
            engine.micro_step(is_last)

    @override
    def check_autocast(self, dtype: torch.dtype | None) -> None:
        for engine in self.engines:
            engine.check_autocast(dtype)

    @override
    def check_clip(self, clip: Clip | None) -> None:
        for engine in self.engines:
            engine.check_clip(clip)

    @override
    def step_of(self, optimizer: Optimizer) -> Callable[..., Any]:
        return self.engines[0].step_of(optimizer)

    @override
    def finish_gradients(self, only: set[int] | None = None) -> None:
        for engine in self.engines:
            engine.finish_gradients(only)

    @override
    def after_step(self) -> None:
        for engine in self.engines:
            engine.after_step()

    @override
    def kinds(self, params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        return self.engines[0].kinds(params)

    @override
    def total_norm(self, params: list[nn.Parameter], norm_type: float, foreach: bool | None) -> Tensor:
        return self.engines[0].total_norm(params, norm_type, foreach)
