"""What the pair costs beside a loop by hand, MMEngine's FSDP and DDP: time, collectives, device syncs.

Everything happens in one process group: each contestant has its own model and optimizer, from the same seed, and sees
the same data. Before anything is timed they are held to the same losses; a comparison of unequal trainings says
nothing.
"""

import cProfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmzero.analysis.collectives import CollectiveLog
from mmzero.analysis.contestants import BY_HAND, FSDP1, HANDS, PAIR, contestants
from mmzero.analysis.paired import MedianRatio, largest_over_ranks, median_ratio, timed_rounds
from mmzero.analysis.setting import Batch, Setting, Step
from mmzero.analysis.syncs import runtime_syncs

WARM_UP_STEPS = 5
"""Untimed first steps: DDP orders its buckets, FSDP its prefetching. Their losses are compared."""

POOL = 16
"""Batches that are used in turn."""


@dataclass(frozen=True)
class Cost:
    """One contestant's step, beside the pair's.

    Args:
        collectives (dict[str, int]): Their number per optimizer step, by kind.
        moved (float): Elements that a rank sends per optimizer step.
        syncs (dict[str, int]): Number of device syncs per optimizer step, by what they are.
        python_calls (int): Function calls of Python's main thread per optimizer step, by cProfile: work of the host
            that no noise of the machine changes.
        seconds (float): Median time of a step, for orientation.
        ratio (MedianRatio): Time of the pair's step by the time of this one's.
        loss_difference (float): Largest relative difference to the pair's losses.
        losses (int): Optimizer steps of which losses were compared.
    """

    collectives: dict[str, int]
    moved: float
    syncs: dict[str, int]
    python_calls: int
    seconds: float
    ratio: MedianRatio
    loss_difference: float
    losses: int


@dataclass(frozen=True)
class Overhead:
    """What was measured in one setting.

    Args:
        setting (dict[str, Any]): What all contestants had in common.
        costs (dict[str, Cost]): By contestant.
        faults (tuple[str, ...]): What makes the comparison unfair, or the pair say more than the loop by hand.
    """

    setting: dict[str, Any]
    costs: dict[str, Cost]
    faults: tuple[str, ...]


@dataclass(frozen=True)
class _Counts:
    collectives: dict[str, int]
    moved: float
    syncs: dict[str, int]
    python_calls: int


def measure_overhead(
    setting: Setting,
    *,
    rounds: int,
    batch_size: int = 4,
    seed: int = 0,
    make: Callable[[Setting], dict[str, Step]] = contestants,
) -> Overhead:
    """Measure all contestants. Collective.

    Args:
        setting (Setting): What they have in common; its model has a method ``batch(seed, size)``.
        rounds (int): Timed steps of each.
        batch_size (int): Of a micro-batch on a rank. Defaults to 4.
        seed (int): Of the orders and the bootstrap. Defaults to 0.
        make (Callable[[Setting], dict[str, Step]]): Builds the contestants. Defaults to all of the engine's.

    Returns:
        Overhead: The same on every rank.
    """
    data = _data(setting, batch_size)
    steps = make(setting)
    losses = {name: [_losses(step(data(i))) for i in range(WARM_UP_STEPS)] for name, step in steps.items()}
    differences = {name: _loss_difference(name, losses, setting.device) for name in steps}
    counts = {name: _count(step, data) for name, step in steps.items()}
    seconds = timed_rounds(
        {name: lambda i, step=step: step(data(i)) for name, step in steps.items()},  # type: ignore[misc]
        rounds,
        setting.device,
        seed,
    )
    costs = {
        name: Cost(
            **vars(counts[name]),
            seconds=float(torch.tensor(seconds[name]).median()),
            ratio=median_ratio(seconds[PAIR], seconds[name], seed=seed),
            loss_difference=differences[name],
            losses=_comparable(name),
        )
        for name in steps
    }
    return Overhead(_describe(setting, rounds, batch_size), costs, _faults_of_all_ranks(setting, costs))


def _data(setting: Setting, size: int) -> Callable[[int], list[Batch]]:
    model: Any = setting.model()
    rank, k = dist.get_rank(), setting.accumulation
    pool = [model.batch(i * dist.get_world_size() + rank, size) for i in range(max(POOL, k))]
    return lambda index: [pool[(index * k + i) % len(pool)] for i in range(k)]


def _losses(losses: list[Tensor]) -> list[float]:
    return [float(loss.detach()) for loss in losses]


def _comparable(name: str) -> int:
    # MMEngine's FSDP clips each rank's shards by the norm of those alone: from its second step on it trains otherwise.
    return 1 if name == FSDP1 else WARM_UP_STEPS


def _loss_difference(name: str, losses: dict[str, list[list[float]]], device: torch.device) -> float:
    number = _comparable(name)
    mine = torch.tensor(losses[name][:number], dtype=torch.float64)
    pairs = torch.tensor(losses[PAIR][:number], dtype=torch.float64)
    difference = ((mine - pairs).abs() / pairs.abs()).max().nan_to_num(nan=float('inf'))
    return float(largest_over_ranks(difference, device))


def _bound(setting: Setting, name: str) -> float:
    """The design's bound in fp32; in bf16 only fully_shard by hand rounds as the pair does, others to some bits."""
    return 1e-2 if setting.bf16 and name != BY_HAND else 1e-6


def _count(step: Step, data: Callable[[int], list[Batch]]) -> _Counts:
    with CollectiveLog() as log:
        step(data(WARM_UP_STEPS))
    more_syncs = runtime_syncs(lambda: step(data(WARM_UP_STEPS + 1)))
    profile = cProfile.Profile()
    profile.runcall(step, data(WARM_UP_STEPS + 2))
    calls = sum(entry.callcount for entry in profile.getstats())
    moved = sum(call.moved for call in log.calls)
    return _Counts(log.counts(), moved, dict(sorted(log.syncs.items())) | more_syncs, calls)


def _faults_of_all_ranks(setting: Setting, costs: dict[str, Cost]) -> tuple[str, ...]:
    mine = []
    for name, cost in costs.items():
        if cost.loss_difference > (bound := _bound(setting, name)):
            mine.append(f'{name}: losses differ from the pair by {cost.loss_difference:.1e}, more than {bound:.0e}')
    for what in ('collectives', 'moved', 'syncs'):
        ours, by_hand = getattr(costs[PAIR], what), getattr(costs[HANDS[setting.engine]], what)
        if ours != by_hand:
            mine.append(f'{what} of the pair and by hand are not equal: {ours} and {by_hand}')
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return tuple(dict.fromkeys(fault for faults in ranks for fault in faults))


def _describe(setting: Setting, rounds: int, batch_size: int) -> dict[str, Any]:
    model = setting.model()
    return dict(
        engine=setting.engine,
        stage=setting.stage,
        accumulation=setting.accumulation,
        dtype='bfloat16' if setting.bf16 else 'float32',
        ranks=dist.get_world_size(),
        device=setting.device.type,
        backend=dist.get_backend(),
        model=type(model).__name__,
        parameters=sum(param.numel() for param in model.parameters()),
        batch_size=batch_size,
        rounds=rounds,
        torch=torch.__version__,
    )
