"""What of a checkpoint goes into a model. On one rank, without communication."""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from mmengine.logging import print_log
from mmengine.runner.checkpoint import _load_checkpoint_to_model
from torch import Tensor, nn

from mmzero.checkpoint.names import EXTRA_STATE, clean_name, clean_names, fitting_names, is_extra_state
from mmzero.checkpoint.sharded.load import SavedTensor, load_saved
from mmzero.checkpoint.taken import Taken, has_hooks, taken_by
from mmzero.errors import CheckpointError

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
    refuse_nothing(model, state, wanted, filename)
    try:
        _load_checkpoint_to_model(model, dict(state_dict=state), strict, 'current', revise_keys=[])
    except Exception as error:
        # Hooks of the model may raise anything.
        raise CheckpointError(f'{filename} does not fit the model: {_text(error)}') from error


def refuse_nothing(model: nn.Module, state: Mapping[str, Any], wanted: Mapping[str, Any], source: str) -> None:
    """Refuse weights of which a model would load none. On one rank, without communication.

    Args:
        model (nn.Module): The model.
        state (Mapping[str, Any]): Weights under clean names.
        wanted (Mapping[str, Any]): Its state dict.
        source (str): Where the weights come from, for the error.

    Raises:
        CheckpointError: If no weight has the name and the shape of one of the model's, nor has once the model's own
            hooks have renamed and resized them.
    """
    try:
        fitting_names(state, wanted, source)
    except CheckpointError:
        if not _weights_of(_taken(model, state, source)):
            raise


def fitting_state(
    model: nn.Module,
    wanted: dict[str, Any],
    saved: dict[str, Any],
    filename: str,
    strict: bool,
    revise_keys: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    """Choose what of a file goes into the shards; rank 0's work, without communication.

    Args:
        model (nn.Module): The sharded model, whose hooks rename and resize.
        wanted (dict[str, Any]): Its state dict.
        saved (dict[str, Any]): Whole tensors by name.
        filename (str): The file, for errors.
        strict (bool): Refuse missing, unexpected and unfit weights.
        revise_keys (Sequence[tuple[str, str]]): As ``load_checkpoint``'s.

    Returns:
        dict[str, Any]: Whole tensors by the model's names.

    Raises:
        CheckpointError: If nothing fits, or not all does and ``strict`` is set; with all that does not.
    """
    state = clean_names(_revised(saved, revise_keys), wanted)
    taken = _taken(model, state, filename)
    if not _weights_of(taken):
        fitting_names(state, wanted, filename)
    _tell(taken, filename, strict)
    return {name: value for name, value in taken.values.items() if not is_extra_state(name)}


def fitting_shards(
    model: nn.Module,
    wanted: dict[str, Any],
    saved: dict[str, Any],
    folder: str,
    strict: bool,
    revise_keys: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    """Choose what of a sharded checkpoint goes into the shards. Collective where the model has hooks.

    What has not the shape that the model wants is read whole, so that hooks can resize it.

    Args:
        model (nn.Module): The sharded model.
        wanted (dict[str, Any]): Its state dict.
        saved (dict[str, Any]): Where tensors were saved, or whole ones, by name.
        folder (str): The checkpoint.
        strict (bool): As :func:`fitting_state`'s.
        revise_keys (Sequence[tuple[str, str]]): As ``load_checkpoint``'s.

    Returns:
        dict[str, Any]: As ``saved``, by the model's names.

    Raises:
        CheckpointError: As :func:`fitting_state`.
    """
    state = clean_names(_revised(saved, revise_keys), wanted)
    fitting = {name: state[name] for name in wanted.keys() & state.keys() if _fits(state[name], wanted[name])}
    unfit = {name: value for name, value in state.items() if name not in fitting and isinstance(value, SavedTensor)}
    whole = _read_whole(unfit) if has_hooks(model) else {}
    shown = {name: _on_meta(whole.get(name, value)) for name, value in state.items()}
    taken = _taken(model, shown | whole, folder)
    made = {name: value for name, value in taken.values.items() if name not in fitting and not value.is_meta}
    taken.values = _last_of_tied(model, fitting) | made
    if not taken.values:
        fitting_names(state, wanted, folder)
    _tell(taken, folder, strict)
    return {name: value for name, value in taken.values.items() if not is_extra_state(name)}


def _last_of_tied(model: nn.Module, fitting: dict[str, Any]) -> dict[str, Any]:
    """Of a parameter that has several names keep the last, whose values are those that stay when torch loads."""
    own = model.state_dict(keep_vars=True)
    last = {id(own[name]): name for name in own if name in fitting}
    return {name: fitting[name] for name in fitting if name not in own or last[id(own[name])] == name}


def _fits(value: Any, target: Any) -> bool:
    return isinstance(target, Tensor) and getattr(value, 'shape', None) == target.shape


def _read_whole(saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
    """Read tensors on every rank. Collective."""
    whole = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in sorted(saved.items())}
    load_saved([(saved[name], tensor) for name, tensor in whole.items()])
    return whole


def _on_meta(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device='meta') if isinstance(value, SavedTensor) else value


def _taken(model: nn.Module, state: Mapping[str, Any], source: str) -> Taken:
    try:
        return taken_by(model, state)
    except Exception as error:
        raise CheckpointError(f'{source} does not fit the model: {_text(error)}') from error


def _weights_of(taken: Taken) -> set[str]:
    """Names of what was in the file, or was made of it; a counter may be made of nothing."""
    return {name for name in taken.values if not name.endswith('num_batches_tracked')}


def _tell(taken: Taken, filename: str, strict: bool) -> None:
    parts = list(taken.faults)
    parts += [f'missing: {", ".join(taken.missing)}'] if taken.missing else []
    parts += [f'left over: {", ".join(taken.left)}'] if taken.left else []
    if not parts:
        return
    lines = '\n'.join(f'  {part}' for part in parts)
    if strict:
        raise CheckpointError(f'{filename} does not fit the model:\n{lines}')
    print_log(f'{filename} is loaded in part; the model does not take all of it:\n{lines}', 'current', logging.WARNING)


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, RuntimeError) else f'{type(error).__name__}: {error}'


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
        name = clean_name(f'{path}.{EXTRA_STATE}' if path else EXTRA_STATE)
        if name in state:
            module.set_extra_state(state[name])


def _revised(state: dict[str, T], revise_keys: Sequence[tuple[str, str]]) -> dict[str, T]:
    for pattern, replacement in revise_keys:
        state = {re.sub(pattern, replacement, name): value for name, value in state.items()}
    return state
