"""Names of weights without what wrappers put into them."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import TypeVar

from mmzero.errors import CheckpointError

T = TypeVar('T')

WRAPPER_PARTS = frozenset({'_orig_mod', '_checkpoint_wrapped_module', '_fsdp_wrapped_module'})


def clean_name(name: str) -> str:
    """Strip the parts that torch.compile, checkpoint wrappers and FSDP1 add to a name.

    Args:
        name (str): A key of a state dict.

    Returns:
        str: The key under which the model itself knows the weight.
    """
    return '.'.join(part for part in name.split('.') if part not in WRAPPER_PARTS)


def clean_names(state: Mapping[str, T]) -> OrderedDict[str, T]:
    """Strip from all names what wrappers put into them.

    DDP's leading ``module.`` goes only where every name has it: a model may have an attribute of that name.

    Args:
        state (Mapping[str, T]): A state dict.

    Returns:
        OrderedDict[str, T]: The same values under clean names; MMEngine's loader sets attributes on it, which a plain
        dict has not.
    """
    cleaned = OrderedDict((clean_name(name), value) for name, value in state.items())
    if cleaned and all(name.startswith('module.') for name in cleaned):
        cleaned = OrderedDict((name.removeprefix('module.'), value) for name, value in cleaned.items())
    return cleaned


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


def _some(names: set[str]) -> str:
    shown = sorted(names)[:3]
    return ', '.join(shown) + (', ...' if len(names) > 3 else '') if shown else 'nothing'
