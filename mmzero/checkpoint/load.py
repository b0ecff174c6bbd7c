"""What of a checkpoint goes into a model. On one rank, without communication."""

import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from mmengine.logging import print_log
from mmengine.runner.checkpoint import _load_checkpoint_to_model
from torch import nn

from mmzero.checkpoint.names import clean_name, clean_names, fitting_names
from mmzero.errors import CheckpointError

# As torch names it in a state dict.
_EXTRA = '_extra_state'

T = TypeVar('T')


def load_into_real(
    model: nn.Module,
    wanted: dict[str, Any],
    checkpoint: dict,
    filename: str,
    strict: bool,
    revise_keys: Sequence[tuple[str, str]],
) -> None:
    """Load into a model that is not sharded yet, by MMEngine's own function."""
    state = clean_names(_revised(checkpoint['state_dict'], revise_keys), wanted)
    fitting_names(state, wanted, filename)
    try:
        _load_checkpoint_to_model(model, dict(state_dict=state), strict, revise_keys=[])
    except RuntimeError as error:
        raise CheckpointError(f'{filename} does not fit the model: {error}') from error


def fitting_state(
    wanted: dict[str, Any],
    saved: dict[str, T],
    filename: str,
    strict: bool,
    revise_keys: Sequence[tuple[str, str]],
) -> dict[str, T]:
    """Choose what of a checkpoint goes into the shards; rank 0's work, without communication."""
    state = clean_names(_revised(saved, revise_keys), wanted)
    fitting = fitting_names(state, wanted, filename)
    extra = {name for name in wanted.keys() & state.keys() if is_extra_state(name)}
    missing, left = sorted(wanted.keys() - fitting - extra), sorted(state.keys() - fitting - extra)
    if strict and (missing or left):
        raise CheckpointError(f'{filename} does not fit the model: missing: {missing[:5]}; left over: {left[:5]}')
    if missing or left:
        print_log(
            f'{filename}: not loaded, since missing or of another shape: {missing}; left over: {left}',
            'current',
            logging.WARNING,
        )
    return {name: state[name] for name in fitting - extra}


def is_extra_state(name: str) -> bool:
    """Say whether a name in a state dict is that of what a module saves by ``get_extra_state``.

    Args:
        name (str): The name.

    Returns:
        bool: Whether it is.
    """
    return name.rpartition('.')[2] == _EXTRA


def load_extra_states(
    model: nn.Module, wanted: Iterable[str], saved: dict[str, Any], revise_keys: Sequence[tuple[str, str]]
) -> None:
    """Give modules what their ``get_extra_state`` has saved, which is no part of any shard. On each rank.

    Args:
        model (nn.Module): The model.
        wanted (Iterable[str]): Names of its weights.
        saved (dict[str, Any]): The checkpoint's weights, of which the extra state has been read.
        revise_keys (Sequence[tuple[str, str]]): As ``load_checkpoint``'s.
    """
    state = clean_names(_revised(saved, revise_keys), wanted)
    for path, module in model.named_modules():
        name = clean_name(f'{path}.{_EXTRA}' if path else _EXTRA)
        if name in state:
            module.set_extra_state(state[name])


def _revised(state: dict[str, T], revise_keys: Sequence[tuple[str, str]]) -> dict[str, T]:
    for pattern, replacement in revise_keys:
        state = {re.sub(pattern, replacement, name): value for name, value in state.items()}
    return state
