"""A checkpoint of MMEngine's layout as tensors that ranks share and the rest, and back."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from mmzero.checkpoint import SavedTensor, load_saved, message_hub_state
from mmzero.errors import CheckpointError
from mmzero.wrappers.several import each

WEIGHTS = ('state_dict', 'ema_state_dict')
"""Entries of a checkpoint that are weights by name."""
_OPTIMIZER = 'optimizer'


def optimizer_parts(optim_wrapper: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Take the state of one optimizer, or of several, apart. Collective.

    Args:
        optim_wrapper (OptimWrapper): The optimizer wrapper, or an OptimWrapperDict.

    Returns:
        tuple[dict[str, Tensor], dict]: Shards by name, and what is saved as ``optimizer``.
    """
    shards: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for path, wrapper in each(optim_wrapper).items():
        own, others = wrapper.shards()
        shards |= {f'{_prefix(path)}{name}': tensor for name, tensor in own.items()}
        _, _, name = path.partition('.')
        rest |= {name: others} if name else others
    return shards, rest


def _prefix(path: str) -> str:
    """The first part of the names of an optimizer's shards."""
    return f'{path.replace("optim_wrapper", _OPTIMIZER, 1)}/'


def split(checkpoint: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Take weights out of a checkpoint.

    Args:
        checkpoint (dict): With weights as this rank's shards; not changed.

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
    return tensors, rest


def join(rest: dict[str, Any], known: Mapping[str, SavedTensor]) -> dict[str, Any]:
    """Make a checkpoint in whose places of tensors is what tells where they were saved.

    Args:
        rest (dict): What was read of the checkpoint.
        known (Mapping[str, SavedTensor]): Its tensors.

    Returns:
        dict: The checkpoint, with what loads an optimizer's shards among its state.
    """
    checkpoint = dict(rest, message_hub=message_hub_state(rest['message_hub']))
    for part in WEIGHTS:
        if part in rest:
            own = {name.removeprefix(f'{part}/'): saved for name, saved in known.items() if name.startswith(f'{part}/')}
            checkpoint[part] = {**own, **rest[part]}
    if _OPTIMIZER in rest:
        checkpoint[_OPTIMIZER] = _with_loading(rest[_OPTIMIZER], 'optim_wrapper', known)
    return checkpoint


def _with_loading(state: dict[str, Any], path: str, known: Mapping[str, SavedTensor]) -> dict[str, Any]:
    if 'param_groups' in state:
        return dict(state, load_shards=partial(_load, _prefix(path), known))
    return {name: _with_loading(own, f'{path}.{name}', known) for name, own in state.items()}


def _load(prefix: str, known: Mapping[str, SavedTensor], targets: dict[str, Tensor]) -> None:
    missing = [name for name in targets if f'{prefix}{name}' not in known]
    if missing:
        raise CheckpointError(f"the checkpoint has no state {missing[:5]} of this run's optimizer")
    load_saved([(known[f'{prefix}{name}'], target) for name, target in targets.items()])
