"""Names of weights without what wrappers put into them."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from mmzero.checkpoint.adapted import with_adapters_names
from mmzero.errors import CheckpointError

T = TypeVar('T')

EXTRA_STATE = '_extra_state'
"""As torch names in a state dict what a module saves by ``get_extra_state``."""

WRAPPER_PARTS = frozenset({'_orig_mod', '_checkpoint_wrapped_module', '_fsdp_wrapped_module'})


def clean_name(name: str) -> str:
    """Strip the parts that torch.compile, checkpoint wrappers and FSDP1 add to a name.

    Args:
        name (str): A key of a state dict.

    Returns:
        str: The key under which the model itself knows the weight.
    """
    return '.'.join(part for part in name.split('.') if part not in WRAPPER_PARTS)


def clean_names(state: Mapping[str, T], wanted: Iterable[str] = ()) -> OrderedDict[str, T]:
    """Strip from all names what wrappers put into them.

    ``module.``, which DDP adds, may also be an attribute of the model. Leading ones go only where every name has
    them, and only as many as bring the names nearest to the model's; further inside, only where the model's own name
    tells that it is one too many or too few. Weights of a model before adapters were put in get their names after that.

    Args:
        state (Mapping[str, T]): A state dict.
        wanted (Iterable[str]): The names of the model that it is for. Defaults to none: not known.

    Returns:
        OrderedDict[str, T]: The same values under clean names, which are the model's own where one is meant; MMEngine's
        loader sets attributes on it, which a plain dict has not.
    """
    own = {clean_name(name): name for name in wanted}
    names = _without_leading_module({name: clean_name(name) for name in state}, own)
    # What is left over is compared without any ``module``; two that look the same then are no match.
    unmet = own.keys() - names.values()
    meant = _unique({name: _without_module(name) for name in unmet})
    offered = _unique({name: _without_module(clean) for name, clean in names.items() if clean not in own})
    for bare in meant.keys() & offered.keys():
        names[offered[bare]] = meant[bare]
    cleaned = OrderedDict((own.get(names[name], names[name]), value) for name, value in state.items())
    if len(cleaned) != len(state):
        raise CheckpointError('two weights of the checkpoint have one name once wrappers are taken out of it')
    if list(cleaned) == list(state) and hasattr(state, '_metadata'):
        # Versions of modules, by which they read weights of older ones.
        vars(cleaned)['_metadata'] = state._metadata
    return with_adapters_names(cleaned, own.values())


def _without_leading_module(names: dict[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Drop so many leading ``module.`` that most names are the model's own; all of them where none ever is."""
    best, most = names, len(own.keys() & names.values())
    while names and all(name.startswith('module.') for name in names.values()):
        names = {saved: name.removeprefix('module.') for saved, name in names.items()}
        matching = len(own.keys() & names.values())
        if matching > most or not most:
            best, most = names, matching
    return best


def _without_module(name: str) -> str:
    return '.'.join(part for part in name.split('.') if part != 'module')


def _unique(values: Mapping[str, str]) -> dict[str, str]:
    """Turn around a mapping, without what stands in it twice."""
    counts = Counter(values.values())
    return {value: key for key, value in values.items() if counts[value] == 1}


def is_extra_state(name: str) -> bool:
    """Say whether a name in a state dict is that of what a module saves by ``get_extra_state``.

    Args:
        name (str): The name.

    Returns:
        bool: Whether it is.
    """
    return name.rpartition('.')[2] == EXTRA_STATE


def matching_names(saved: Iterable[str], wanted: Iterable[str], source: str) -> set[str]:
    """Find the names that a checkpoint and a model have in common.

    Args:
        saved (Iterable[str]): Names in the checkpoint.
        wanted (Iterable[str]): Names in the model.
        source (str): The checkpoint, for the error.

    Returns:
        set[str]: Names in both.

    Raises:
        CheckpointError: If there is none, so that nothing would be loaded.
    """
    saved, wanted = set(saved), set(wanted)
    common = saved & wanted
    if wanted and not common:
        raise CheckpointError(
            f'{source}: none of its {len(saved)} weights is in the model. It holds {_some(saved)}; the model wants '
            f'{_some(wanted)}. Is it a checkpoint of another model?'
        )
    return common


def fitting_names(state: Mapping[str, Any], wanted: Mapping[str, Any], source: str) -> set[str]:
    """Find the names under which a checkpoint and a model have weights of one shape.

    Args:
        state (Mapping[str, Any]): The checkpoint's weights, under clean names.
        wanted (Mapping[str, Any]): The model's own state dict. What is no tensor, as a module's extra state, does not
            count.
        source (str): The checkpoint, for the error.

    Returns:
        set[str]: The names.

    Raises:
        CheckpointError: If there is none, so that nothing would be loaded.
    """
    shapes = {name: value.shape for name, value in wanted.items() if isinstance(value, Tensor)}
    common = matching_names(state, shapes, source)
    fitting = {name for name in common if getattr(state[name], 'shape', None) == shapes[name]}
    if common and not fitting:
        name = min(common)
        raise CheckpointError(
            f'{source}: no weight has the shape that the model wants; {name} is {tuple(state[name].shape)} there and '
            f'{tuple(shapes[name])} in the model. Is it a checkpoint of a model of another size?'
        )
    return fitting


def _some(names: set[str]) -> str:
    shown = sorted(names)[:3]
    return ', '.join(shown) + (', ...' if len(names) > 3 else '') if shown else 'nothing'
