"""Names of weights without what wrappers put into them."""

from collections.abc import Iterable

from mmzero.errors import CheckpointError

WRAPPER_PARTS = frozenset({'_orig_mod', '_checkpoint_wrapped_module', '_fsdp_wrapped_module'})


def clean_name(name: str) -> str:
    """Strip the parts that DDP, torch.compile, checkpoint wrappers and FSDP1 add to a name.

    Args:
        name (str): A key of a state dict.

    Returns:
        str: The key under which the model itself knows the weight.
    """
    parts = [part for part in name.split('.') if part not in WRAPPER_PARTS]
    return '.'.join(parts[1:] if parts[0] == 'module' and len(parts) > 1 else parts)


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
