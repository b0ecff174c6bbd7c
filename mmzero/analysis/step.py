"""One optimizer step of the pair, measured: its memory, its traffic, beside what was forecast."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from mmzero.analysis.collectives import CollectiveLog
from mmzero.analysis.memory import STATES, MemoryRecorder, StepMemory
from mmzero.analysis.weight_copies import WeightCopies
from mmzero.config import OffloadConfig
from mmzero.engines import Engine, Forecast
from mmzero.planner import PaperFormula, paper_formula


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step took on one rank, and what it should.

    Args:
        stage (int): ZeRO stage.
        mesh (tuple[int, int]): Ranks that replicate, ranks that shard.
        micro_batches (int): Forwards and backwards per optimizer step.
        numel (int): Parameters of the model.
        memory (StepMemory): Measured.
        forecast (Forecast): The engine's, from the plan.
        paper (PaperFormula): The ZeRO paper's.
        moved (float): Measured elements that a rank sends.
        collectives (dict[str, int]): Measured number by kind.
        weight_copies (int): Measured bytes of copies that autocast made of weights and autograd kept, the most of a
            micro-batch.
    """

    stage: int
    mesh: tuple[int, int]
    micro_batches: int
    numel: int
    memory: StepMemory
    forecast: Forecast
    paper: PaperFormula
    moved: float
    collectives: dict[str, int]
    weight_copies: int

    @property
    def bytes(self) -> int:
        """Measured bytes at the peak, of what ZeRO is about."""
        return max(self.memory.states)

    @property
    def memory_ratio(self) -> float:
        """Measured over forecast bytes."""
        return self.bytes / self.forecast.bytes

    @property
    def traffic_ratio(self) -> float:
        """Measured over forecast elements; 1 where nothing moves."""
        return self.moved / self.forecast.moved if self.forecast.moved else float(self.moved == 0)

    def as_dict(self) -> dict[str, Any]:
        """Everything but the series, for JSON.

        Returns:
            dict[str, Any]: Numbers, texts, dicts of numbers.
        """
        at_peak = self.memory.at_peak()
        return dict(
            stage=self.stage,
            replicate=self.mesh[0],
            shard=self.mesh[1],
            micro_batches=self.micro_batches,
            parameters=self.numel,
            memory=dict(
                bytes=self.bytes,
                at_peak={name: at_peak[name] for name in STATES},
                others_at_peak={name: size for name, size in at_peak.items() if name not in STATES},
                with_activations_bytes=max(self.memory.everything),
                forecast_bytes=self.forecast.bytes,
                forecast_at_peak=dict(self.forecast.memory),
                ratio=self.memory_ratio,
                formula=self.forecast.formula,
                formula_bytes=self.forecast.formula_bytes,
                paper_formula=self.paper.formula,
                paper_bytes=self.paper.bytes,
            ),
            traffic=dict(
                elements=self.moved,
                collectives=self.collectives,
                forecast_elements=self.forecast.moved,
                ratio=self.traffic_ratio,
                formula=self.forecast.moved_formula,
                formula_elements=self.forecast.formula_moved,
                paper_formula=self.paper.moved_formula,
                paper_elements=self.paper.moved,
            ),
            weight_copies=self.weight_copies,
        )


def measure_step(model: Any, optim_wrapper: Any, next_batch: Callable[[], Any]) -> StepReport:
    """Run two optimizer steps: traffic is counted in the first, memory recorded in the second. Collective.

    A budget for activations chooses in steps before these.

    Args:
        model (ZeroModelWrapper): The wrapped model.
        optim_wrapper (ZeroOptimWrapper): Of its parameters.
        next_batch (Callable[[], Any]): Gives a batch of this rank's, micro-batch by micro-batch.

    Returns:
        StepReport: This rank's.
    """
    copies: list[WeightCopies] = []

    def watching() -> AbstractContextManager[None]:
        copies.append(WeightCopies())
        return copies[-1].watching()

    while model.budget is not None and not model.budget.is_done:
        run_step(model, optim_wrapper, next_batch)
    with CollectiveLog() as traffic:
        run_step(model, optim_wrapper, next_batch, watching)
    memory, forecast = record_memory(model, optim_wrapper, next_batch)
    world_size = dist.get_world_size()
    mesh = model.config.mesh.sizes(world_size) if model.engine.shards else (world_size, 1)
    return StepReport(
        stage=model.config.stage,
        mesh=mesh,
        micro_batches=optim_wrapper._accumulative_counts,
        numel=model.plan.numel,
        memory=memory,
        forecast=forecast,
        paper=paper_formula(model.config.stage, model.plan.numel, mesh[1] if model.engine.shards else world_size),
        moved=sum(call.moved for call in traffic.calls),
        collectives=traffic.counts(),
        weight_copies=max(copy.bytes for copy in copies),
    )


def run_step(
    model: Any,
    optim_wrapper: Any,
    next_batch: Callable[[], Any],
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Run the micro-batches of one optimizer step. Collective.

    Args:
        model (ZeroModelWrapper): The wrapped model.
        optim_wrapper (ZeroOptimWrapper): Of its parameters.
        next_batch (Callable[[], Any]): Gives a batch of this rank's.
        around (Callable[[], ContextManager]): In which each micro-batch runs. Defaults to none.
    """
    model.train()
    optim_wrapper.initialize_count_status(model, 0, optim_wrapper._accumulative_counts)
    for _ in range(optim_wrapper._accumulative_counts):
        batch = next_batch()
        with around():
            model.train_step(batch, optim_wrapper)


def record_memory(model: Any, optim_wrapper: Any, next_batch: Callable[[], Any]) -> tuple[StepMemory, Forecast]:
    """Run one optimizer step, not the first, which makes the optimizer's state, and record its memory. Collective.

    Args:
        model (ZeroModelWrapper): The wrapped model.
        optim_wrapper (ZeroOptimWrapper): Of its parameters.
        next_batch (Callable[[], Any]): Gives a batch of this rank's.

    Returns:
        tuple[StepMemory, Forecast]: What was measured, and what the engine forecasts.
    """
    recorder = MemoryRecorder(model.module, model.plan, optim_wrapper.optimizer)
    with recorder.record(optim_wrapper):
        run_step(model, optim_wrapper, next_batch)
    forecast = _without_offload(model.engine).forecast(
        model.plan,
        world_size=dist.get_world_size(),
        micro_batches=optim_wrapper._accumulative_counts,
        state_itemsize=state_itemsize(optim_wrapper.optimizer),
    )
    return recorder.memory, forecast


def _without_offload(engine: Engine) -> Engine:
    """The engine whose forecast is what a CPU shows, where host memory is all there is."""
    if engine.device.type != 'cpu' or not engine.config.offload.to_host:
        return engine
    return type(engine)(replace(engine.config, offload=OffloadConfig()), engine.device)


def state_itemsize(optimizer: Optimizer) -> int:
    """Bytes of state that an optimizer keeps per element of an fp32 parameter: told by one step on a parameter.

    Args:
        optimizer (Optimizer): The optimizer.

    Returns:
        int: Bytes; 8 for Adam, 4 for SGD with momentum.
    """
    probe = nn.Parameter(torch.ones(64, 64))
    probe.grad = torch.ones_like(probe)
    group = optimizer.param_groups[0]
    accepted = inspect.signature(type(optimizer)).parameters.keys() - {'params'}
    twin = type(optimizer)([probe], **{name: value for name, value in group.items() if name in accepted})
    twin.step()
    sizes = [value.nbytes for value in twin.state[probe].values() if isinstance(value, Tensor)]
    return round(sum(sizes) / probe.numel())
