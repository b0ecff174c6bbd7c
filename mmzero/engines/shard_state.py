"""An optimizer's state as what ranks hold, by names of parameters, for any number of ranks and any stage."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mmzero.engines.meeting import meet
from mmzero.engines.state import (
    ADVICE,
    check_groups,
    check_names,
    group_names,
    load_packed,
    on_devices_of,
    own_part,
    shards_everywhere,
)
from mmzero.errors import CheckpointError

LoadShards = Callable[[dict[str, Tensor]], None]
"""Fills shards by name. Collective."""


def optimizer_shards(
    optimizer: Optimizer, named: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Take an optimizer's state apart. Collective, one exchange of names.

    Args:
        optimizer (Optimizer): The optimizer on sharded parameters.
        named (Mapping[str, nn.Parameter]): The model's parameters, of which it has some.

    Returns:
        tuple[dict[str, Tensor], dict]: State of a parameter's shape, sharded where the parameter is, by
        'PARAMETER.ENTRY', and the rest: groups with the names of their parameters, other entries by name of the
        parameter, and the dtypes of the first.
    """
    meet("save the optimizer's state")
    packed = optimizer.state_dict()
    names = group_names(optimizer, named)
    params = [param for group in optimizer.param_groups for param in group['params']]
    are_shards = shards_everywhere(packed['state'])

    def is_shard(index: Any, key: str, value: Any) -> bool:
        return (index, key) in are_shards or (isinstance(index, int) and _is_whole_of(value, params[index]))

    shards, entries, dtypes = by_name(packed['state'], names, is_shard)
    entries = {name: {key: own_part(value) for key, value in own.items()} for name, own in entries.items()}
    return shards, dict(packed, state=entries, shards=dtypes, param_names=names)


def by_name(
    state: Mapping[Any, Mapping[str, Any]],
    param_names: Sequence[Sequence[str]],
    is_shard: Callable[[Any, str, Any], bool],
) -> tuple[dict[str, Tensor], dict[Any, dict[str, Any]], dict[Any, dict[str, str]]]:
    """Take an optimizer's state apart.

    Args:
        state (Mapping): Entries by number of the parameter, as ``Optimizer.state_dict`` has them.
        param_names (Sequence[Sequence[str]]): Names of parameters, by groups.
        is_shard (Callable[[Any, str, Any], bool]): Says of number, name of the entry and value whether to take it out.

    Returns:
        tuple[dict[str, Tensor], dict, dict]: What was taken out by 'PARAMETER.ENTRY', other entries by parameter, and
        the dtypes of the first by parameter and entry.
    """
    names = [name for group in param_names for name in group]
    shards: dict[str, Tensor] = {}
    entries: dict[Any, dict[str, Any]] = {}
    dtypes: dict[Any, dict[str, str]] = {}
    for index, own in state.items():
        # What some optimizers keep of no parameter has a name of its own.
        name = names[index] if isinstance(index, int) else index
        taken = {key: value for key, value in own.items() if is_shard(index, key, value)}
        entries[name] = {key: value for key, value in own.items() if key not in taken}
        shards |= {f'{name}.{key}': value for key, value in taken.items()}
        if taken:
            dtypes[name] = {key: str(value.dtype).removeprefix('torch.') for key, value in taken.items()}
    return shards, entries, dtypes


def by_number(
    entries: Mapping[Any, Mapping[str, Any]],
    shards: Mapping[Any, Iterable[str]],
    param_names: Sequence[Sequence[str]],
    shard: Callable[[str], Any],
) -> dict[Any, dict[str, Any]]:
    """Undo :func:`by_name`, for a file or for ranks with other numbers.

    Args:
        entries (Mapping): By parameter.
        shards (Mapping[Any, Iterable[str]]): Names of entries that were taken out, by parameter.
        param_names (Sequence[Sequence[str]]): Names of parameters, by groups, whose order gives the numbers.
        shard (Callable[[str], Any]): Gives what was taken out by 'PARAMETER.ENTRY'.

    Returns:
        dict: The state as ``Optimizer.state_dict`` has it.
    """
    indices = {name: index for index, name in enumerate(name for group in param_names for name in group)}
    state = {indices.get(name, name): dict(own) for name, own in entries.items()}
    for name, keys in shards.items():
        state[indices[name]] |= {key: shard(f'{name}.{key}') for key in keys}
    return state


def _is_whole_of(value: Any, param: Tensor) -> bool:
    """Whether it has the shape of a parameter that every rank holds whole, and is no number."""
    is_plain = type(value) is Tensor and not isinstance(param, DTensor)
    return is_plain and value.dim() > 0 and value.shape == param.shape


def load_optimizer_shards(
    optimizer: Optimizer, named: Mapping[str, nn.Parameter], rest: dict[str, Any], load: LoadShards
) -> None:
    """Put an optimizer's state together again. Collective.

    Args:
        optimizer (Optimizer): The optimizer on sharded parameters; changed in place.
        named (Mapping[str, nn.Parameter]): The model's parameters, of which it has some.
        rest (dict): As :func:`optimizer_shards` gave it, the same on every rank.
        load (LoadShards): Reads the shards.

    Raises:
        CheckpointError: On every rank, if the groups do not fit.
    """
    rest = dict(rest)
    own, saved = group_names(optimizer, named), rest.pop('param_names')
    check_groups(optimizer, rest['param_groups'])
    check_names(saved, own)
    params = {name: param for group in optimizer.param_groups for name, param in _named_in(group, named)}
    shards, targets = rest.pop('shards'), {}
    for name, keys in shards.items():
        for key, dtype in keys.items():
            targets[f'{name}.{key}'] = _empty_like(params, name, getattr(torch, dtype))
    load(targets)
    state = by_number(rest['state'], shards, own, targets.__getitem__)
    groups = [
        on_devices_of(group, mine) for group, mine in zip(rest['param_groups'], optimizer.param_groups, strict=True)
    ]
    load_packed(optimizer, dict(rest, state=state, param_groups=groups))


def _named_in(group: dict[str, Any], named: Mapping[str, nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    names = {id(param): name for name, param in named.items()}
    return [(names[id(param)], param) for param in group['params'] if id(param) in names]


def _empty_like(params: Mapping[str, nn.Parameter], name: str, dtype: torch.dtype) -> Tensor:
    if name not in params:
        raise CheckpointError(f"the checkpoint's optimizer has state of {name!r}, which this run's has not; {ADVICE}")
    param = params[name]
    if isinstance(param, DTensor):
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    # It was sharded when it was saved, and is whole now, as at stage 0.
    return torch.zeros(param.shape, dtype=dtype, device=param.device)
