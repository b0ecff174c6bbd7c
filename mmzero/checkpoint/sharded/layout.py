"""Names in a sharded checkpoint: of weights, and of an optimizer's state by its parameters."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from mmzero.checkpoint.plain import message_hub_state
from mmzero.checkpoint.sharded.load import SavedTensor, load_saved
from mmzero.engines import SHARDS
from mmzero.errors import CheckpointError

WEIGHTS = ('state_dict', 'ema_state_dict')
"""Entries of a checkpoint that are weights by name."""
OPTIMIZER = 'optimizer'
REST = 'rest'
"""The first part of the names of shards that are elsewhere in a checkpoint."""
SHARD = 'saved as a shard'
"""The key of what stands in the place of one of these."""
LOAD = 'load_shards'
"""The key of an optimizer's state under which stands what reads its shards."""


def optimizer_prefix(name: str = '') -> str:
    """The first part of the names of an optimizer's shards.

    Args:
        name (str): Its own, where there are several. Defaults to none.

    Returns:
        str: The prefix.
    """
    return f'{OPTIMIZER}.{name}/' if name else f'{OPTIMIZER}/'


def split(checkpoint: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Take weights out of a checkpoint.

    Args:
        checkpoint (dict): With weights whole, or as this rank's shards; not changed.

    Returns:
        tuple[dict[str, Tensor], dict]: Tensors by their names in a sharded checkpoint, and the rest.
    """
    tensors: dict[str, Tensor] = {}
    rest = dict(checkpoint)
    for part in WEIGHTS:
        if part in checkpoint:
            own = {name: value for name, value in checkpoint[part].items() if isinstance(value, Tensor)}
            tensors |= {f'{part}/{name}': value for name, value in own.items()}
            rest[part] = {name: value for name, value in checkpoint[part].items() if name not in own}
    return tensors, {key: _without_shards(value, key, tensors) for key, value in rest.items()}


def _without_shards(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Take shards out of what hooks have put into a checkpoint: rank 0's part of one would be of no use."""
    if isinstance(value, SHARDS):
        tensors[f'{REST}/{path}'] = value
        return {SHARD: f'{REST}/{path}'}
    if type(value) is dict:
        return {key: _without_shards(item, f'{path}.{key}', tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_shards(item, f'{path}.{index}', tensors) for index, item in enumerate(value))
    return value


def with_shards(value: Any, known: Mapping[str, Any]) -> Any:
    """Put shards back where they were taken out.

    Args:
        value (Any): What was read of a checkpoint, or a part of it.
        known (Mapping[str, Any]): What to put there, by names in the checkpoint.

    Returns:
        Any: The same with these.
    """
    if type(value) is dict:
        if value.keys() == {SHARD}:
            return known[value[SHARD]]
        return {key: with_shards(item, known) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(with_shards(item, known) for item in value)
    return value


def join(
    rest: dict[str, Any], known: Mapping[str, Any], with_state: Callable[[str, dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Put what :func:`split` took out of a checkpoint back.

    Args:
        rest (dict): What was read of the checkpoint.
        known (Mapping[str, Any]): What to put in the places of its tensors, by their names.
        with_state (Callable): Is given the prefix of an optimizer's shards and its state without them, and returns the
            state.

    Returns:
        dict: The checkpoint.
    """
    checkpoint = with_shards(rest, known)
    for part in WEIGHTS:
        if part in rest:
            own = {name.removeprefix(f'{part}/'): value for name, value in known.items() if name.startswith(f'{part}/')}
            checkpoint[part] = {**own, **rest[part]}
    if OPTIMIZER in rest:
        states = {
            name: with_state(optimizer_prefix(name), state) for name, state in optimizers_in(rest[OPTIMIZER]).items()
        }
        checkpoint[OPTIMIZER] = states.get('', states)
    return checkpoint


def to_load(rest: dict[str, Any], known: Mapping[str, SavedTensor]) -> dict[str, Any]:
    """Make a checkpoint in whose places of tensors is what tells where they were saved.

    Args:
        rest (dict): What was read of the checkpoint.
        known (Mapping[str, SavedTensor]): Its tensors.

    Returns:
        dict: The checkpoint, with what loads an optimizer's shards among its state.
    """
    checkpoint = join(rest, known, lambda prefix, state: {**state, LOAD: partial(_load, prefix, known)})
    if 'message_hub' in rest:
        checkpoint['message_hub'] = message_hub_state(rest['message_hub'])
    return checkpoint


def optimizers_in(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The states of optimizers by name.

    Args:
        state (dict): What is saved as ``optimizer``.

    Returns:
        dict[str, dict]: One of several optimizers by its name; of a single one the name is ''.
    """
    return {'': state} if 'param_groups' in state else state


def _load(prefix: str, known: Mapping[str, SavedTensor], targets: dict[str, Tensor]) -> None:
    missing = [name for name in targets if f'{prefix}{name}' not in known]
    if missing:
        raise CheckpointError(f"the checkpoint has no state {missing[:5]} of this run's optimizer")
    load_saved([(known[f'{prefix}{name}'], target) for name, target in targets.items()])
