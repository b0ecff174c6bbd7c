"""What a model keeps for backward, and what recomputing it costs, by way of checkpointing.

[Note: measuring activations]
Bytes are counted at the end of forward, by hooks on saved tensors, each storage once, without parameters. The time of a
recompute is taken inside of it and divided by the rest of the same step, forward and backward: both are a moment apart
on the same machine, so that its drift cancels. Of several rounds, in which the ways take turns, the median counts.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmengine.runner import set_random_seed
from torch import Tensor, nn

from mmzero.analysis.sweep.models import Case
from mmzero.analysis.sweep.reduction import walk
from mmzero.config import CheckpointingConfig
from mmzero.patches import Budget, KeptBytes, apply_patches
from mmzero.wrappers.regions import DEFAULT_OF_BUDGET, chosen_regions

NONE = 'none'
BUDGET = 'Budget at half'


@dataclass(frozen=True)
class Cost:
    """What one way of checkpointing takes.

    Args:
        regions (int): Number of modules that are recomputed, or offloaded.
        kept (int): Bytes kept for backward on the device.
        host (int): Bytes kept for backward in host memory.
        recompute (float): Seconds of all recomputes by those of the rest of the step.
    """

    regions: int
    kept: int
    host: int
    recompute: float


def ways_of(model: nn.Module) -> dict[str, CheckpointingConfig]:
    """List the ways to checkpoint a model that are compared.

    Args:
        model (nn.Module): The model.

    Returns:
        dict[str, CheckpointingConfig]: By name: nothing, the blocks of its first part (such as the backbone), of more
        and more parts, then all of them op by op and offloaded.
    """
    ways = {NONE: CheckpointingConfig()}
    parts: list[str] = []
    blocks: tuple[str, ...] = ()
    for part, names in blocks_by_part(model).items():
        parts.append(part)
        blocks += tuple(names)
        ways[' + '.join(parts)] = CheckpointingConfig(modules=blocks)
    everything = CheckpointingConfig(modules=blocks)
    ways['all, matmuls kept'] = replace(everything, save='matmuls')
    ways['all, inputs offloaded'] = replace(everything, offload='cpu')
    ways['none, all offloaded'] = replace(everything, save='all', offload='cpu')
    return ways


def blocks_by_part(model: nn.Module) -> dict[str, list[str]]:
    """Find the repeated blocks of each part of a model.

    Args:
        model (nn.Module): The model.

    Returns:
        dict[str, list[str]]: Paths by the first name in them, such as 'backbone', in the order of the model.
    """
    parts: dict[str, list[str]] = defaultdict(list)
    for name in chosen_regions(model, CheckpointingConfig(policy=DEFAULT_OF_BUDGET)):
        parts[name.partition('.')[0]].append(name)
    return dict(parts)


class _Clock:
    """Adds up the time inside of recomputes."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self._device = device

    def now(self) -> float:
        if self._device.type == 'cuda':
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    @contextmanager
    def running(self) -> Iterator[None]:
        start = self.now()
        try:
            yield
        finally:
            self.seconds += self.now() - start

    def observe(self, tensors: list[Tensor]) -> tuple:
        return nullcontext(), self.running()


def run_step(model: nn.Module, loss_of: Callable[[], Tensor], config: CheckpointingConfig) -> Cost:
    """Run forward and backward once.

    Args:
        model (nn.Module): The model, without regions.
        loss_of (Callable): Runs its forward, with the random state set.
        config (CheckpointingConfig): The way of checkpointing.

    Returns:
        Cost: What it took.
    """
    applied = apply_patches(model, config)
    kept, selected = KeptBytes(), KeptBytes()
    clock, step = (_Clock(next(model.parameters()).device) for _ in range(2))
    for region in applied.regions.values():
        region.observe = clock.observe
        region.see_selected = selected.add_all
    try:
        with step.running():
            with kept.counting():
                loss = loss_of()
            sizes = {**kept.sizes, **selected.sizes}
            loss.backward()
    finally:
        applied.undo()
        model.zero_grad()
    host = sum({region.host.moved for region in applied.regions.values()})
    return Cost(len(applied.regions), sum(sizes.values()), host, clock.seconds / (step.seconds - clock.seconds))


def choose_by_budget(model: nn.Module, loss_of: Callable[[], Tensor], memory: int) -> CheckpointingConfig:
    """Let a budget choose on one rank.

    Args:
        model (nn.Module): The model, without regions.
        loss_of (Callable): Runs its forward.
        memory (int): Bytes that may be kept.

    Returns:
        CheckpointingConfig: Its choice.
    """
    blocks = chosen_regions(model, CheckpointingConfig(policy=DEFAULT_OF_BUDGET))
    applied = apply_patches(model, CheckpointingConfig(modules=blocks))
    budget = Budget(applied.regions, memory, lambda own: [own], lambda text, _: print(text, flush=True))
    try:
        while budget.choice is None:
            with budget.forward():
                loss = loss_of()
            loss.backward()
            model.zero_grad()
            budget.after_step()
    finally:
        applied.undo()
    return CheckpointingConfig(modules=tuple(sorted(budget.choice.recomputed)))


def measure_activations(model: nn.Module, loss_of: Callable[[], Tensor], rounds: int) -> dict[str, Cost]:
    """Measure all ways.

    Args:
        model (nn.Module): The model.
        loss_of (Callable): Runs its forward, with the random state set.
        rounds (int): Steps of each way, after one to warm up.

    Returns:
        dict[str, Cost]: By way; ratios are medians over rounds.
    """
    ways = ways_of(model)
    half = run_step(model, loss_of, ways[NONE]).kept // 2
    ways[BUDGET] = choose_by_budget(model, loss_of, half)
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, config in ways.items():
            costs[name].append(run_step(model, loss_of, config))
    return {
        name: replace(found[-1], recompute=statistics.median(cost.recompute for cost in found))
        for name, found in costs.items()
    }


def case_without_checkpointing(cfg: Config, size: int, device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Build a config's model with its own checkpointing turned off, and what runs its forward on one batch.

    Args:
        cfg (Config): A config of mmdet, mmseg or mmpretrain.
        size (int): Side of the square images in pixels.
        device (torch.device): Where to run it.

    Returns:
        tuple[nn.Module, Callable]: The model, in training mode, and a function that returns its loss.
    """
    case = Case(cfg, size)
    for part in walk(case.model_cfg):
        part.update({name: off for name, off in OWN_OPTIONS.items() if name in part})
    model: Any = case.build().to(device)

    def loss_of() -> Tensor:
        batch = case.batch(model, 0)
        set_random_seed(0)
        with DefaultScope.overwrite_default_scope(case.scope):
            data = model.data_preprocessor(batch, True)
            return model.parse_losses(model(**data, mode='loss'))[0]

    return model, loss_of


OWN_OPTIONS = dict(with_cp=False, num_cp=-1)
"""By which models of the OpenMMLab packages checkpoint themselves, turned off."""


def activations_table(found: dict[str, Cost]) -> str:
    """Lay out what was measured.

    Args:
        found (dict[str, Cost]): By way.

    Returns:
        str: A Markdown table.
    """
    rows: Sequence[str] = [
        '| recomputed | modules | kept, MiB | of none | in host memory, MiB | recompute / rest of the step |',
        '|---' * 6 + '|',
        *(
            f'| {name} | {cost.regions} | {cost.kept / 2**20:.1f} | {cost.kept / found[NONE].kept:.2f} | '
            f'{cost.host / 2**20:.1f} | {cost.recompute:.3f} |'
            for name, cost in found.items()
        ),
    ]
    return '\n'.join(rows)
