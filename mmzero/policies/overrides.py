"""Rules for single units: from the ``overrides`` of a config to the units of a plan."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mmzero.config import OverrideConfig
from mmzero.errors import ConfigError, near_names
from mmzero.policies.patterns import matches_or_holds, without_match
from mmzero.policies.plan import WrapPlan
from mmzero.policies.unit import Unit

ROOT = '(root)'
"""How patterns name the root unit, which has no name."""

_PATH = 'model_wrapper_cfg.overrides'


def apply_overrides(plan: WrapPlan, overrides: Sequence[OverrideConfig]) -> WrapPlan:
    """Give units the rules of a config. Pure.

    Args:
        plan (WrapPlan): The plan of a policy.
        overrides (Sequence[OverrideConfig]): The entries; later ones win, field by field.

    Returns:
        WrapPlan: The same units with their rules.

    Raises:
        ConfigError: If a pattern names no unit, or an entry shards what an earlier one leaves whole; it lists all
            faults.
    """
    names = [unit.name or ROOT for unit in plan.units]
    faults: list[str] = []
    for index, entry in enumerate(overrides):
        for pattern in without_match(entry.units, names):
            faults.append(f'{_PATH}[{index}].units: {pattern!r} names no unit{near_names(pattern, names)}')
    units = tuple(_with_rules(unit, overrides, faults) for unit in plan.units)
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))
    return replace(plan, units=units)


def _with_rules(unit: Unit, overrides: Sequence[OverrideConfig], faults: list[str]) -> Unit:
    name, said = unit.name or ROOT, dict[str, Any]()
    whole_by = -1
    for index, entry in enumerate(overrides):
        if not any(matches_or_holds(pattern, name) for pattern in entry.units):
            continue
        rules = entry.rules()
        if rules.get('shard') is False:
            # There is nothing to reshard or to split any more.
            whole_by, said = index, {key: value for key, value in said.items() if key not in _OF_SHARDS}
        said.update(rules)
        clash = [key for key in _OF_SHARDS if key in rules and said.get('shard') is False]
        faults += [
            f'{_PATH}[{index}].{key}: is for {name}, which overrides[{whole_by}] leaves whole by shard=False; leave '
            f'{name} out of one of them'
            for key in clash
        ]
    return replace(unit, rules=replace(unit.rules, **said)) if said else unit


_OF_SHARDS = ('reshard_after_forward', 'shard_dim')


def resolve_rules(plan: WrapPlan, shard_size: int, ranks_per_node: int | None) -> WrapPlan:
    """Turn rules that depend on the ranks into what they mean on so many. Pure.

    'node' becomes the ranks of a node: True where all shards of a unit lie in one node, False where a node has one
    rank. Parameters that do not split evenly along ``shard_dim`` are split along dim 0, which the notes say.

    Args:
        plan (WrapPlan): The plan with its rules.
        shard_size (int): Ranks that share the parameters.
        ranks_per_node (int, optional): As the launcher says; None where it does not.

    Returns:
        WrapPlan: The plan; its rules name numbers of ranks.

    Raises:
        ConfigError: If a number of ranks does not divide the shard ranks, no launcher says what a node is, or no
            parameter of a unit can be split as asked; it lists all faults.
    """
    faults: Found = defaultdict(list)
    uneven: Found = defaultdict(list)
    units = tuple(_resolved(unit, shard_size, ranks_per_node, faults) for unit in plan.units)
    for unit in units:
        _check_dims(unit, shard_size, faults)
        if params := _uneven(unit, shard_size):
            why = f'dim {unit.rules.shard_dim} does not divide by {shard_size}: {_some(params)}'
            uneven[why].append(unit.name or ROOT)
    if faults:
        raise ConfigError([f'{_PATH}: {fault} (for {_some(names)})' for fault, names in faults.items()])
    notes = tuple(f'{_some(names)}: split along dim 0, since {why}' for why, names in uneven.items())
    return replace(plan, units=units, notes=(*plan.notes, *notes))


Found = dict[str, list[str]]
"""What was found, and the names of the units of which it is true."""


def _resolved(unit: Unit, shard_size: int, ranks_per_node: int | None, faults: Found) -> Unit:
    rule, name = unit.rules.reshard_after_forward, unit.name or ROOT
    if rule is None or isinstance(rule, bool):
        return unit
    said, ranks = repr(rule), rule
    if rule == 'node':
        if ranks_per_node is None:
            faults[
                "reshard_after_forward='node' needs the number of ranks on a node, which torchrun and MPI set in the "
                'environment (LOCAL_WORLD_SIZE); give the number itself'
            ].append(name)
            return unit
        if ranks_per_node == 1 or ranks_per_node % shard_size == 0:
            reshards = ranks_per_node > 1 or shard_size == 1
            return replace(unit, rules=replace(unit.rules, reshard_after_forward=reshards))
        said, ranks = f"'node', {ranks_per_node} ranks", ranks_per_node
    divisors = [str(number) for number in range(2, shard_size) if shard_size % number == 0]
    if str(ranks) not in divisors:
        allowed = f'proper divisors: {", ".join(divisors)}' if divisors else 'it has none: use True or False'
        faults[
            f'reshard_after_forward={said} does not divide the {shard_size} rank(s) of the shard dimension; {allowed}'
        ].append(name)
        return unit
    return replace(unit, rules=replace(unit.rules, reshard_after_forward=ranks))


def _check_dims(unit: Unit, shard_size: int, faults: Found) -> None:
    dim, name = unit.rules.shard_dim, unit.name or ROOT
    if not dim or not unit.params:
        return
    if dim not in unit.shard_dims(shard_size):
        shapes = _some([f'{param} {shape}' for param, shape in zip(_short(unit), unit.shapes, strict=True)])
        faults[
            f'shard_dim={dim}: no parameter has a dim {dim} that divides by {shard_size}, the ranks of the shard '
            f'dimension: {shapes}; leave shard_dim out'
        ].append(name)
    elif not isinstance(unit.rules.reshard_after_forward, bool | None):
        faults[
            f'shard_dim={dim} beside reshard_after_forward to part of the ranks, which FSDP2 does for dim 0 only; '
            'remove one'
        ].append(name)


def _uneven(unit: Unit, shard_size: int) -> list[str]:
    """What has the dimension that the rules name, and is split along dim 0 all the same."""
    dim = unit.rules.shard_dim
    if not dim:
        return []
    split = zip(_short(unit), unit.shapes, unit.shard_dims(shard_size), strict=True)
    return [f'{name} {shape}' for name, shape, found in split if found != dim and len(shape) > dim]


def _short(unit: Unit) -> list[str]:
    """Names of its parameters below it."""
    return [name.removeprefix(f'{unit.name}.') if unit.name else name for name in unit.params]


def _some(items: Sequence[str]) -> str:
    return ', '.join(items[:3]) + (f' and {len(items) - 3} more' if len(items) > 3 else '')
