"""Ways to gather units earlier or to keep them, measured beside FSDP2's own.

[Note: what FSDP2 prefetches by itself]
In backward the next unit's all-gather is issued before the current one's gradients are computed. In forward the host
runs ahead of a GPU, and what it issues overlaps; explicit prefetching helps where it does not run ahead. The order of
units is known after the first iteration. The last unit of forward is the first of backward: kept in between, it is
gathered once less, and is held while what comes after it computes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mmzero.analysis.collectives import CollectiveLog
from mmzero.analysis.contestants import build_pair
from mmzero.analysis.paired import MedianRatio, largest_over_ranks, median_ratio, timed_rounds
from mmzero.analysis.setting import Setting
from mmzero.analysis.step import record_memory, run_step
from mmzero.wrappers import ZeroModelWrapper

PLAIN = 'as FSDP2 does it'


@dataclass(frozen=True)
class Variant:
    """What one way takes.

    Args:
        collectives (dict[str, int]): Their number per step, by kind.
        states (int): Bytes at the peak of what ZeRO is about.
        everything (int): Bytes at the peak with activations.
        ratio (MedianRatio): Time of its step by the time of FSDP2's own way.
    """

    collectives: dict[str, int]
    states: int
    everything: int
    ratio: MedianRatio


def forward_prefetch(units: Sequence[Any]) -> None:
    """Each unit gathers the next one in forward (``FSDPModule.set_modules_to_forward_prefetch``)."""
    for unit, after in zip(units, units[1:], strict=False):
        unit.set_modules_to_forward_prefetch([after])


def backward_prefetch(units: Sequence[Any]) -> None:
    """Each unit gathers the two before it in backward (``set_modules_to_backward_prefetch``)."""
    for index, unit in enumerate(units):
        unit.set_modules_to_backward_prefetch(list(reversed(units[max(index - 2, 0) : index])))


def last_unit_kept(units: Sequence[Any]) -> None:
    """The last unit of forward stays gathered until its backward."""
    units[-1].set_reshard_after_forward(False, recurse=False)


VARIANTS: dict[str, Callable[[Sequence[Any]], None]] = {
    PLAIN: lambda units: None,
    'next unit gathered in forward': forward_prefetch,
    'two units gathered ahead in backward': backward_prefetch,
    'last unit kept after forward': last_unit_kept,
}


def units_in_order(model: ZeroModelWrapper, run: Callable[[], None]) -> list[nn.Module]:
    """The units in the order in which an iteration first runs them.

    Args:
        model (ZeroModelWrapper): The sharded model.
        run (Callable[[], None]): Runs an iteration.

    Returns:
        list[nn.Module]: Without the root.
    """
    order: dict[nn.Module, None] = {}
    units = [model.module.get_submodule(unit.name) for unit in model.plan.units if unit.name]
    handles = [unit.register_forward_pre_hook(lambda module, _: order.setdefault(module)) for unit in units]
    run()
    for handle in handles:
        handle.remove()
    return list(order)


def measure_prefetch(setting: Setting, rounds: int, batch_size: int = 4, seed: int = 0) -> dict[str, Variant]:
    """Measure all ways on one model each. Collective.

    Args:
        setting (Setting): What they have in common.
        rounds (int): Timed steps of each.
        batch_size (int): Of a micro-batch on a rank. Defaults to 4.
        seed (int): Of the orders and the bootstrap. Defaults to 0.

    Returns:
        dict[str, Variant]: By name, of this rank.
    """
    source: Any = setting.model()
    batch = source.batch(dist.get_rank(), batch_size)
    steps: dict[str, Callable[[int], None]] = {}
    counts, memories = {}, {}
    for name, change in VARIANTS.items():
        model, optim = build_pair(setting)

        def step(_: int = 0, model: Any = model, optim: Any = optim) -> None:
            run_step(model, optim, lambda: batch)

        engine: Any = model.engine
        engine.prefetch.turn_off()
        change(units_in_order(model, step))
        step()
        with CollectiveLog() as log:
            step()
        counts[name], (memories[name], _) = log.counts(), record_memory(model, optim, lambda: batch)
        steps[name] = step
    seconds = timed_rounds(steps, rounds, setting.device, seed)
    sizes = torch.tensor([[max(memory.states), max(memory.everything)] for memory in memories.values()])
    peaks = largest_over_ranks(sizes, setting.device).tolist()
    return {
        name: Variant(counts[name], states, everything, median_ratio(seconds[name], seconds[PLAIN], seed=seed))
        for name, (states, everything) in zip(VARIANTS, peaks, strict=True)
    }


def prefetch_table(found: dict[str, Variant]) -> str:
    """Lay out what was measured, for docs.

    Args:
        found (dict[str, Variant]): By name.

    Returns:
        str: A Markdown table.
    """
    rows = ['| units are gathered | time / FSDP2 | 95% interval | collectives | peak, MB | with activations, MB |']
    rows.append('|---' * 6 + '|')
    for name, variant in found.items():
        ratio, calls = variant.ratio, ', '.join(f'{number} {kind}' for kind, number in variant.collectives.items())
        interval = '' if name == PLAIN else f'{ratio.low:.3f} to {ratio.high:.3f}'
        sizes = f'{variant.states / 1e6:.2f} | {variant.everything / 1e6:.2f}'
        rows.append(f'| {name} | {ratio.median:.3f} | {interval} | {calls} | {sizes} |')
    return '\n'.join(rows)
