"""Memory and traffic of a step on FSDP2, from the plan alone."""

from collections import Counter
from collections.abc import Iterator

from mmzero.engines.forecast import Forecast, is_fine_tuning
from mmzero.engines.fsdp2.replay import Replay
from mmzero.engines.fsdp2.stages import StageRules
from mmzero.engines.fsdp2.unit_bytes import UnitLayout, UnitNode
from mmzero.policies import Unit


def forecast(
    layouts: list[tuple[Unit, UnitLayout]],
    rules: StageRules,
    *,
    world_size: int,
    micro_batches: int,
    state_itemsize: int,
    find_unused: bool = False,
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
        find_unused (bool): Whether ranks tell each other which parameters they used. Defaults to False.

    Returns:
        Forecast: The forecast.
    """
    # An optimizer's state has the dtype of its parameter.
    state = sum(unit.trained_bytes(layout.shard_size) for unit, layout in layouts) * state_itemsize // 4
    parameters = sum(unit.kept_bytes(layout.shard_size) for unit, layout in layouts)
    host = _on_host(layouts, state_itemsize)
    device = dict(parameters=parameters - host.get('parameters', 0), optimizer=state - host.get('optimizer', 0))
    replay = Replay(layouts, rules, device)
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
        collectives=_collectives(layouts, rules, world_size, micro_batches, find_unused),
        host=host,
        to_device=_to_device(layouts, rules, micro_batches),
        to_host=_reductions(rules, micro_batches) * host.get('gradients', 0),
    )


def _on_host(layouts: list[tuple[Unit, UnitLayout]], state_itemsize: int) -> dict[str, int]:
    """What lies in host memory: all shards, or none; what is whole on every rank stays on the device."""
    nodes = [UnitNode(unit, layout) for unit, layout in layouts if layout.is_on_host]
    if not nodes:
        return {}
    gradients = sum(node.bytes.sharded for node in nodes)
    return dict(
        parameters=sum(node.bytes.kept for node in nodes),
        gradients=gradients,
        optimizer=gradients * state_itemsize // 4,
    )


def _to_device(layouts: list[tuple[Unit, UnitLayout]], rules: StageRules, micro_batches: int) -> int:
    """Bytes of shards that are copied from host memory: once per gathering of what is not on the device in part."""
    copied = 0
    for unit, layout, forwards, backwards in _passes(layouts, rules, micro_batches):
        if layout.is_on_host:
            again = backwards if layout.backward_size == layout.shard_size else 0
            copied += (forwards + again) * UnitNode(unit, layout).bytes.kept
    return copied


def _reductions(rules: StageRules, micro_batches: int) -> int:
    """How often a unit's gradients are reduced per optimizer step."""
    return micro_batches if rules.sync_every_micro_step else 1


def _passes(
    layouts: list[tuple[Unit, UnitLayout]], rules: StageRules, micro_batches: int
) -> Iterator[tuple[Unit, UnitLayout, int, int]]:
    """Each unit, how often it is gathered in forward, and how often in backward, per optimizer step."""
    units = [unit for unit, _ in layouts]
    first_trained = min(
        (place for unit in units for place, train in zip(unit.places, unit.trainable, strict=True) if train),
        default=0,
    )
    frozen = [unit for unit in units[:-1] if max(unit.places) < first_trained]
    for unit, layout in layouts:
        # Autograd does not come to units before the first one that trains; the last of them is prefetched in vain.
        passed = unit not in frozen or unit is max(frozen, key=lambda item: item.places)
        forwards = 1 if rules.keep_gathered else micro_batches
        yield unit, layout, forwards, forwards * passed if layout.is_gathered_again else 0


def _moved(layouts: list[tuple[Unit, UnitLayout]], rules: StageRules, world_size: int, micro_batches: int) -> float:
    """Elements of all-gathers and reduce-scatters with their padding, and of the all-reduces between replicas."""
    moved, reductions = 0.0, _reductions(rules, micro_batches)
    for unit, layout, forwards, backwards in _passes(layouts, rules, micro_batches):
        kept, trained = _split_numels(unit, layout.shard_size)
        backward, replicas = layout.backward_size, world_size // layout.shard_size
        moved += forwards * (layout.shard_size - 1) * kept
        moved += backwards * (backward - 1) / backward * kept * layout.shard_size
        moved += reductions * (layout.shard_size - 1) * trained
        moved += 2 * (replicas - 1) / replicas * reductions * trained
    return moved


def _collectives(
    layouts: list[tuple[Unit, UnitLayout]], rules: StageRules, world_size: int, micro_batches: int, find_unused: bool
) -> dict[str, int]:
    """One collective per unit and pass, which FSDP2 leaves out in a group of one."""
    counts: Counter[str] = Counter()
    reductions, has_whole = _reductions(rules, micro_batches), False
    for unit, layout, forwards, backwards in _passes(layouts, rules, micro_batches):
        kept, trained = _split_numels(unit, layout.shard_size)
        counts['all_gather'] += (forwards + backwards) if kept and layout.shard_size > 1 else 0
        counts['reduce_scatter'] += reductions if trained and layout.shard_size > 1 else 0
        counts['all_reduce'] += reductions if trained and world_size > layout.shard_size else 0
        has_whole |= any(whole and train for whole, train in zip(unit.is_whole, unit.trainable, strict=True))
    counts['all_reduce'] += has_whole + find_unused
    return {kind: count for kind, count in counts.items() if count}


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
    gathered = sum(unit.gathered_bytes(layout.itemsize) for unit, layout in layouts)
    if any(layout.is_on_host for _, layout in layouts):
        return _on_host_formula(layouts, rules, micro_batches, alive_bytes, gathered)
    if is_fine_tuning([unit for unit, _ in layouts]):
        return _fine_tuned(layouts, rules, micro_batches, state_itemsize, alive_bytes, gathered)
    a, lasting = sum(unit.numel for unit, _ in layouts), 4 + state_itemsize
    share = sum(unit.numel / layout.shard_size for unit, layout in layouts)
    width = f'{gathered / a:.3g}a'
    if rules.reshard_after_forward:
        text = f'{lasting + 4}a/N + the units alive at once'
        if micro_batches == 1 or rules.sync_every_micro_step:
            return share * (lasting + 4) + alive_bytes, text
        return share * (lasting + 4) + alive_bytes + 4 * a, f'{text} + 4a'
    if micro_batches == 1:
        return share * lasting + max(gathered, 4 * share), f'{lasting}a/N + max({width}, 4a/N)'
    if rules.sync_every_micro_step:
        return share * (lasting + 4) + gathered, f'{lasting + 4}a/N + {width}'
    return share * lasting + gathered + 4 * a, f'{lasting}a/N + {width} + 4a'


def _on_host_formula(
    layouts: list[tuple[Unit, UnitLayout]], rules: StageRules, micro_batches: int, alive_bytes: int, gathered: int
) -> tuple[float, str]:
    """What stays on the device: gathered parameters, and whole gradients that wait for the last micro-batch."""
    a, trained = sum(unit.numel for unit, _ in layouts), sum(unit.trained_numel() for unit, _ in layouts)
    own, text = (alive_bytes, 'the units alive at once') if rules.reshard_after_forward else (gathered, '')
    text = text or f'{gathered / a:.3g}a'
    if micro_batches == 1 or rules.sync_every_micro_step:
        return own, text
    return own + 4 * trained, f'{text} + 4{"a" if trained == a else "t"}'


def _fine_tuned(
    layouts: list[tuple[Unit, UnitLayout]],
    rules: StageRules,
    micro_batches: int,
    state_itemsize: int,
    alive_bytes: int,
    gathered: int,
) -> tuple[float, str]:
    """The same where most is frozen: p bytes of parameters as they are stored, t bytes of those that train."""
    kept = sum(unit.gathered_bytes() / layout.shard_size for unit, layout in layouts)
    trained = sum(unit.trained_bytes() / layout.shard_size for unit, layout in layouts)
    whole = sum(unit.trained_bytes() for unit, _ in layouts)
    state = state_itemsize // 4
    lasting, text = kept + (state + 1) * trained, f'(p + {state + 1}t)/N'
    rest, named = (alive_bytes, 'the units alive at once') if rules.reshard_after_forward else (gathered, 'gathered p')
    text = f'{text} + {named}'
    if micro_batches == 1 or rules.sync_every_micro_step:
        return lasting + rest, f'{text}; p, t: bytes of all and of trained parameters'
    return lasting + rest + whole, f'{text} + t; p, t: bytes of all and of trained parameters'
