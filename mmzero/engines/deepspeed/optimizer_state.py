"""The optimizer's state in the layout of the unsharded optimizer, and back, one tensor at a time."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmzero.engines.deepspeed.fragments import Fragments
from mmzero.engines.deepspeed.groups import AllGroups
from mmzero.engines.flat_shard import FlatShard
from mmzero.engines.materialize import broadcast
from mmzero.engines.meeting import meet
from mmzero.engines.shard_state import LoadShards, by_name, by_number
from mmzero.engines.state import (
    ADVICE,
    Whole,
    check_groups,
    check_names,
    described_state,
    on_devices_of,
    refuse_other,
)
from mmzero.errors import CheckpointError


def gather_state(groups: AllGroups, fragments: Fragments, names: list[list[str]]) -> dict[str, Any]:
    """Gather an optimizer's state. Collective.

    Args:
        groups (AllGroups): The groups.
        fragments (Fragments): What this rank holds.
        names (list[list[str]]): Names of the groups' parameters.

    Returns:
        dict: ``Optimizer.state_dict()`` of the unsharded optimizer on rank 0, with ``param_names``; empty elsewhere.
    """
    meet("gather the optimizer's state")
    packed = _packed(groups, fragments, fragments.gather)
    return dict(packed, param_names=names) if dist.get_rank() == 0 else {}


def shards_of_state(
    groups: AllGroups, fragments: Fragments, names: list[list[str]]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Take an optimizer's state apart. Collective, ranks only wait for each other.

    Args:
        groups (AllGroups): The groups.
        fragments (Fragments): What this rank holds.
        names (list[list[str]]): Names of the groups' parameters.

    Returns:
        tuple[dict[str, Tensor], dict]: As :func:`mmzero.engines.shard_state.optimizer_shards`.
    """
    meet("save the optimizer's state")
    packed = _packed(groups, fragments, fragments.shard)
    shards, entries, dtypes = by_name(packed['state'], names, lambda _, __, value: isinstance(value, FlatShard))
    return shards, dict(packed, state=entries, shards=dtypes, param_names=names)


def _packed(
    groups: AllGroups, fragments: Fragments, take: Callable[[nn.Parameter, Tensor], Tensor | None]
) -> dict[str, Any]:
    """The state as ``Optimizer.state_dict`` has it, with what is taken of each parameter's own part of an entry."""
    params = _all(groups)
    state = {
        index: entries
        for index, param in enumerate(params)
        if param in fragments.of and (entries := _entries(param, fragments, take))
    }
    numbers = iter(range(len(params)))
    packed = [
        dict(group, params=[next(numbers) for _ in group['params']]) for group in groups.as_of_model().param_groups
    ]
    return dict(state=state, param_groups=packed)


def _all(groups: AllGroups) -> list[nn.Parameter]:
    return [param for group in groups.params for param in group]


def _entries(param: nn.Parameter, fragments: Fragments, take: Callable[[nn.Parameter, Tensor], Any]) -> dict[str, Any]:
    fragment = fragments.of[param]
    found: dict[str, Any] = {}
    flat = fragments.flat(fragment.group)
    for name, value in fragments.entries(fragment.group).items():
        if isinstance(value, Tensor) and value.shape == flat.shape:
            found[name] = take(param, fragment.of(value))
        else:
            found[name] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
    return found


def scatter_state(groups: AllGroups, fragments: Fragments, full: dict[str, Any], names: list[list[str]]) -> None:
    """Fill an optimizer's state from the full one of rank 0. Collective.

    Args:
        groups (AllGroups): The groups; changed in place.
        fragments (Fragments): What this rank holds; changed in place.
        full (dict): ``Optimizer.state_dict()`` of an unsharded optimizer on rank 0; ignored on other ranks.
        names (list[list[str]]): Names of this run's parameters by groups.

    Raises:
        CheckpointError: On every rank, if the groups or the kind of optimizer do not fit.
    """
    box = [described_state(full, _has_elements)] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(box, src=0)
    described: dict[str, Any] = box[0]  # type: ignore[assignment]
    check_groups(groups.as_of_model(), described['param_groups'])
    check_names(described.get('param_names', names), names)
    params = _all(groups)
    for index, name, part in _parts_to_fill(groups, fragments, described):
        param = params[index]
        whole = torch.empty(fragments.of[param].shape, dtype=part.dtype, device=fragments.device)
        if dist.get_rank() == 0:
            whole.copy_(full['state'][index][name])
        broadcast(whole)
        part.copy_(fragments.cut(param, whole))
    _link(fragments.zero)


def load_shards(
    groups: AllGroups, fragments: Fragments, rest: dict[str, Any], names: list[list[str]], load: LoadShards
) -> None:
    """Put an optimizer's state together again. Collective.

    Args:
        groups (AllGroups): The groups; changed in place.
        fragments (Fragments): What this rank holds; changed in place.
        rest (dict): As :func:`mmzero.engines.shard_state.optimizer_shards` gave it under any engine.
        names (list[list[str]]): Names of this run's parameters by groups.
        load (LoadShards): Reads shards by name.

    Raises:
        CheckpointError: On every rank, if the groups or the kind of optimizer do not fit.
    """
    check_groups(groups.as_of_model(), rest['param_groups'])
    check_names(rest['param_names'], names)
    params = dict(zip((name for group in names for name in group), _all(groups), strict=True))
    others = [name for name in rest['shards'] if params[name] not in fragments.of]
    if others:
        raise CheckpointError(
            f"the checkpoint's optimizer has state of {others[0]!r}, which this run does not train; {ADVICE}"
        )
    wholes = {
        f'{name}.{key}': Whole(tuple(fragments.of[params[name]].shape), getattr(torch, dtype))
        for name, keys in rest['shards'].items()
        for key, dtype in keys.items()
    }
    described = dict(rest, state=by_number(rest['state'], rest['shards'], names, wholes.__getitem__))
    by_index = list(params.items())
    targets: dict[str, Tensor] = {}
    for index, key, part in _parts_to_fill(groups, fragments, described):
        name, param = by_index[index]
        targets[f'{name}.{key}'] = fragments.shard(param, part)
    load(targets)
    _link(fragments.zero)


def _parts_to_fill(
    groups: AllGroups, fragments: Fragments, described: dict[str, Any]
) -> Iterator[tuple[int, str, Tensor]]:
    """Take over what is no tensor of a parameter's shape; give this rank's parts of the others, to be filled.

    Args:
        groups (AllGroups): The groups; changed in place.
        fragments (Fragments): What this rank holds; changed in place.
        described (dict): The state to load, of groups that fit, with :class:`Whole` for what comes by itself; the same
            on every rank.

    Yields:
        tuple[int, str, Tensor]: Number of the parameter, name of the entry, and this rank's part of it, flat.

    Raises:
        CheckpointError: If the kind of optimizer, or a shape, does not fit.
    """
    refuse_other(
        groups.inner,
        [key for key in groups.defaults if any(key not in group for group in described['param_groups'])],
    )
    for group, saved in zip(groups.param_groups, described['param_groups'], strict=True):
        group.update(on_devices_of({key: value for key, value in saved.items() if key != 'params'}, group))
    plain = _plain_entries(groups, fragments, described['state'])
    params = [(index, param) for index, param in enumerate(_all(groups)) if param in fragments.of]
    wholes = {index: _wholes(fragments.of[param].shape, described['state'].get(index, {})) for index, param in params}
    dtypes: dict[int, dict[str, torch.dtype]] = {group: {} for group in plain}
    for index, param in params:
        dtypes[fragments.of[param].group].update({name: entry.dtype for name, entry in wholes[index].items()})
    for number, names in dtypes.items():
        fragments.make_entries(number, plain[number], names)
    entries = {number: fragments.entries(number) for number in dtypes}
    for index, param in params:
        fragment = fragments.of[param]
        for name in wholes[index]:
            yield index, name, fragment.of(entries[fragment.group][name])


def _has_elements(value: Any) -> bool:
    """Whether it is cut; of a counter DeepSpeed has one for all parameters of a flat tensor."""
    return isinstance(value, Tensor) and value.dim() > 0


def _plain_entries(groups: AllGroups, fragments: Fragments, state: dict[int, dict[str, Any]]) -> dict[int, dict]:
    """Counters by flat tensor, which has one for all its parameters."""
    found: dict[int, dict[str, Any]] = {}
    for index, param in enumerate(_all(groups)):
        if param not in fragments.of:
            continue
        plain = {name: value for name, value in state.get(index, {}).items() if not isinstance(value, Whole)}
        before = found.setdefault(fragments.of[param].group, plain)
        if {name: float(value) for name, value in before.items()} != {k: float(v) for k, v in plain.items()}:
            raise CheckpointError(
                f'parameter {index} of the checkpoint took other numbers of steps than others of its group ({plain} '
                f'and {before}), for which DeepSpeed has one number; {ADVICE}'
            )
    return found


def _wholes(shape: torch.Size, entries: dict[str, Any]) -> dict[str, Whole]:
    """What of a parameter's state comes by itself."""
    found = {name: entry for name, entry in entries.items() if isinstance(entry, Whole)}
    for name, entry in found.items():
        if entry.shape != tuple(shape):
            raise CheckpointError(
                f"{name} of the checkpoint's optimizer has shape {entry.shape}, the parameter {tuple(shape)}: another "
                f'optimizer, or another order of parameters; {ADVICE}'
            )
    return found


def _link(zero: Any) -> None:
    """Show DeepSpeed the state, of which it keeps views by parameter."""
    if hasattr(zero, '_hp_optimizer_states_linked') and zero.optimizer.state:
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()
