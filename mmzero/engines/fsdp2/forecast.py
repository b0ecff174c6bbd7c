"""Memory and traffic of a step on FSDP2, from the plan alone."""

from collections import Counter
from collections.abc import Iterator

from mmzero.engines.forecast import Forecast
from mmzero.engines.fsdp2.replay import Replay
from mmzero.engines.fsdp2.stages import StageRules
from mmzero.policies import Unit, WrapPlan


def forecast(
    plan: WrapPlan,
    rules: StageRules,
    *,
    mesh: tuple[int, int],
    itemsize: int | None,
    reduce_itemsize: int | None,
    micro_batches: int,
    state_itemsize: int,
    find_unused: bool = False,
) -> Forecast:
    """Forecast one optimizer step in which every unit runs once per micro-batch, as units are registered.

    What a plan does not say is not in it: units that run twice or not at all, and checkpointed regions that enclose
    units, whose units stay gathered from the recomputation to the end of their region's backward.

    Args:
        plan (WrapPlan): The units.
        rules (StageRules): Of the stage.
        mesh (tuple[int, int]): Sizes of the replicate and the shard dimension.
        itemsize (int, optional): Bytes per element of gathered units other than the root; None: as stored.
        reduce_itemsize (int, optional): Bytes per reduced element; None: as gathered.
        micro_batches (int): Per optimizer step.
        state_itemsize (int): Bytes of optimizer state per trained fp32 parameter.
        find_unused (bool): Whether ranks tell each other which parameters they used. Defaults to False.

    Returns:
        Forecast: The forecast.
    """
    replicas, shard = mesh
    # An optimizer's state has the dtype of its parameter.
    state = sum(unit.trained_bytes(shard) for unit in plan.units) * state_itemsize // 4
    parameters = sum(unit.kept_bytes(shard) for unit in plan.units)
    lasting = dict(parameters=parameters, optimizer=state)
    replay = Replay(plan, rules, shard, itemsize, reduce_itemsize, lasting, is_replicated=replicas > 1)
    replay.run(micro_batches)
    total, text = _closed(plan, rules, shard, itemsize, micro_batches, state_itemsize, replay.alive_bytes())
    times = _gathers(rules, micro_batches) + _reductions(rules, micro_batches)
    return Forecast(
        memory=replay.peak,
        formula_bytes=total,
        formula=text,
        moved=_moved(plan, rules, replicas, shard, micro_batches),
        formula_moved=times * plan.numel * (shard - 1) / shard,
        moved_formula=f'{times}a',
        collectives=_collectives(plan, rules, replicas, shard, micro_batches, find_unused),
    )


def _gathers(rules: StageRules, micro_batches: int) -> int:
    """How often a unit is gathered per optimizer step."""
    return 2 * micro_batches if rules.reshard_after_forward else 1


def _reductions(rules: StageRules, micro_batches: int) -> int:
    """How often a unit's gradients are reduced per optimizer step."""
    return micro_batches if rules.sync_every_micro_step else 1


def _passes(plan: WrapPlan, rules: StageRules, micro_batches: int) -> Iterator[tuple[Unit, int, int]]:
    """Each unit, how often it is gathered, and how often reduced per optimizer step."""
    first_trained = min(
        (place for unit in plan.units for place, train in zip(unit.places, unit.trainable, strict=True) if train),
        default=0,
    )
    frozen = [unit for unit in plan.units[:-1] if max(unit.places) < first_trained]
    for unit in plan.units:
        # Autograd does not come to units before the first one that trains; the last of them is prefetched in vain.
        passed = unit not in frozen or unit is max(frozen, key=lambda item: item.places)
        gathers = _gathers(rules, micro_batches) if passed else min(_gathers(rules, micro_batches), micro_batches)
        yield unit, gathers, _reductions(rules, micro_batches)


def _moved(plan: WrapPlan, rules: StageRules, replicas: int, shard: int, micro_batches: int) -> float:
    """Elements of all-gathers and reduce-scatters with their padding, and of the all-reduces between replicas."""
    moved = 0.0
    for unit, gathers, reductions in _passes(plan, rules, micro_batches):
        kept = sum(n for n, shape in zip(unit.kept_numels(shard), unit.shapes, strict=True) if shape)
        trained = unit.trained_numel(shard)
        moved += (shard - 1) * (gathers * kept + reductions * trained)
        moved += 2 * (replicas - 1) / replicas * reductions * trained
    return moved


def _collectives(
    plan: WrapPlan, rules: StageRules, replicas: int, shard: int, micro_batches: int, find_unused: bool
) -> dict[str, int]:
    """One collective per unit and pass, which FSDP2 leaves out in a group of one."""
    counts: Counter[str] = Counter()
    for unit, gathers, reductions in _passes(plan, rules, micro_batches):
        split = [train for shape, train in zip(unit.shapes, unit.trainable, strict=True) if shape]
        counts['all_gather'] += gathers if split and shard > 1 else 0
        counts['reduce_scatter'] += reductions if any(split) and shard > 1 else 0
        counts['all_reduce'] += reductions if any(split) and replicas > 1 else 0
    scalars = any(
        train and not shape for unit in plan.units for shape, train in zip(unit.shapes, unit.trainable, strict=True)
    )
    counts['all_reduce'] += scalars + find_unused
    return {kind: count for kind, count in counts.items() if count}


def _closed(
    plan: WrapPlan,
    rules: StageRules,
    shard: int,
    itemsize: int | None,
    micro_batches: int,
    state_itemsize: int,
    alive_bytes: int,
) -> tuple[float, str]:
    """The formula of the stage table, and its text.

    Gradients and gathered parameters make room for each other in backward, so that with one micro-batch a step
    never holds both in full.
    """
    a, lasting = plan.numel, 4 + state_itemsize
    gathered = sum(unit.gathered_bytes(itemsize if unit.name else None) for unit in plan.units)
    width = f'{gathered / a:.3g}a'
    if rules.reshard_after_forward:
        return a * (lasting + 4) / shard + alive_bytes, f'{lasting + 4}a/N + the units alive at once'
    if micro_batches == 1:
        return a * lasting / shard + max(gathered, 4 * a / shard), f'{lasting}a/N + max({width}, 4a/N)'
    if rules.sync_every_micro_step:
        return a * (lasting + 4) / shard + gathered, f'{lasting + 4}a/N + {width}'
    return a * lasting / shard + gathered + 4 * a, f'{lasting}a/N + {width} + 4a'
