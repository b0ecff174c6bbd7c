"""Memory and traffic of a step on FSDP2, from the plan alone."""

from mmzero.engines.forecast import Forecast
from mmzero.engines.fsdp2.replay import Replay
from mmzero.engines.fsdp2.stages import StageRules
from mmzero.engines.fsdp2.unit_bytes import UnitLayout
from mmzero.policies import Unit


def forecast(
    layouts: list[tuple[Unit, UnitLayout]],
    rules: StageRules,
    *,
    world_size: int,
    micro_batches: int,
    state_itemsize: int,
) -> Forecast:
    """Forecast one optimizer step in which every unit runs once per micro-batch, as units are registered.

    What a plan does not say is not in it: units that run twice or not at all, and checkpointed regions that enclose
    units, whose units stay gathered from the recomputation to the end of their region's backward.

    Args:
        layouts (list[tuple[Unit, UnitLayout]]): The units of a plan, the root last, and how each is gathered and
            reduced.
        rules (StageRules): Of the stage.
        world_size (int): Number of ranks.
        micro_batches (int): Per optimizer step.
        state_itemsize (int): Bytes of optimizer state per trained fp32 parameter.

    Returns:
        Forecast: The forecast.
    """
    # An optimizer's state has the dtype of its parameter.
    state = sum(unit.trained_bytes(layout.shard_size) for unit, layout in layouts) * state_itemsize // 4
    parameters = sum(unit.kept_bytes(layout.shard_size) for unit, layout in layouts)
    replay = Replay(layouts, rules, dict(parameters=parameters, optimizer=state))
    replay.run(micro_batches)
    total, text = _closed(layouts, rules, micro_batches, state_itemsize, replay.alive_bytes())
    times = (2 * micro_batches if rules.reshard_after_forward else 1) + _reductions(rules, micro_batches)
    shared = sum(unit.numel * (layout.shard_size - 1) / layout.shard_size for unit, layout in layouts)
    return Forecast(
        memory=replay.peak,
        formula_bytes=total,
        formula=text,
        moved=_moved(layouts, rules, world_size, micro_batches),
        formula_moved=times * shared,
        moved_formula=f'{times}a',
    )


def _reductions(rules: StageRules, micro_batches: int) -> int:
    """How often a unit's gradients are reduced per optimizer step."""
    return micro_batches if rules.sync_every_micro_step else 1


def _moved(layouts: list[tuple[Unit, UnitLayout]], rules: StageRules, world_size: int, micro_batches: int) -> float:
    """Elements of all-gathers and reduce-scatters with their padding, and of the all-reduces between replicas."""
    units = [unit for unit, _ in layouts]
    first_trained = min(
        (place for unit in units for place, train in zip(unit.places, unit.trainable, strict=True) if train),
        default=0,
    )
    frozen = [unit for unit in units[:-1] if max(unit.places) < first_trained]
    moved = 0.0
    for unit, layout in layouts:
        kept, trained = _split_numels(unit, layout.shard_size)
        # Autograd does not come to units before the first one that trains; the last of them is prefetched in vain.
        passed = unit not in frozen or unit is max(frozen, key=lambda item: item.places)
        forwards = 1 if rules.keep_gathered else micro_batches
        backward, whole = layout.backward_size, kept * layout.shard_size
        moved += forwards * (layout.shard_size - 1) * kept
        moved += forwards * passed * (backward - 1) / backward * whole
        reductions = _reductions(rules, micro_batches)
        moved += reductions * (layout.shard_size - 1) * trained
        replicas = world_size // layout.shard_size
        moved += 2 * (replicas - 1) / replicas * reductions * trained
    return moved


def _split_numels(unit: Unit, shard_size: int) -> tuple[int, int]:
    """Elements of a rank's shard, and of those that train; without what is whole on every rank."""
    split = zip(unit.kept_numels(shard_size), unit.is_whole, unit.trainable, strict=True)
    kept = [(numel, train) for numel, whole, train in split if not whole]
    return sum(numel for numel, _ in kept), sum(numel for numel, train in kept if train)


def _closed(
    layouts: list[tuple[Unit, UnitLayout]],
    rules: StageRules,
    micro_batches: int,
    state_itemsize: int,
    alive_bytes: int,
) -> tuple[float, str]:
    """The formula of the stage table, and its text.

    Gradients and gathered parameters make room for each other in backward, so that with one micro-batch a step
    never holds both in full.
    """
    a, lasting = sum(unit.numel for unit, _ in layouts), 4 + state_itemsize
    share = sum(unit.numel / layout.shard_size for unit, layout in layouts)
    gathered = sum(unit.gathered_bytes(layout.itemsize) for unit, layout in layouts)
    width = f'{gathered / a:.3g}a'
    if rules.reshard_after_forward:
        return share * (lasting + 4) + alive_bytes, f'{lasting + 4}a/N + the units alive at once'
    if micro_batches == 1:
        return share * lasting + max(gathered, 4 * share), f'{lasting}a/N + max({width}, 4a/N)'
    if rules.sync_every_micro_step:
        return share * (lasting + 4) + gathered, f'{lasting + 4}a/N + {width}'
    return share * lasting + gathered + 4 * a, f'{lasting}a/N + {width} + 4a'
