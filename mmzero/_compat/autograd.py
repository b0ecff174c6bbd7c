"""What autograd has saved, counted and cast."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch


def use_count(tensor: torch.Tensor) -> int:
    """How many references to a tensor torch's own code and Python hold together. Remove once it is public.

    Args:
        tensor (Tensor): The tensor.

    Returns:
        int: The number.
    """
    return tensor._use_count()  # type: ignore[attr-defined]


def without_autocast_on_cpu() -> AbstractContextManager:
    """Leave autocast's key out of dispatch, for an operator that it calls itself. Remove once torch has it in public.

    ``torch.autocast(enabled=False)`` would also clear its cache of cast weights.

    Returns:
        AbstractContextManager: The context.
    """
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def saved_tensors_hooks_in_force() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """Get the hooks that autograd packs and unpacks saved tensors with.

    Only the innermost ones are called, so that hooks that do not mean to hide others pass tensors on to these. Remove
    once torch tells them in public.

    Returns:
        tuple: Two functions; what keeps tensors as they are where there are none.
    """
    found = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return (_kept_as_it_is, _given_back) if found is None else found[:2]


def _kept_as_it_is(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    # An output that its own graph holds would never be freed without a backward.
    return (tensor if tensor.is_leaf else tensor.detach()), tensor._version


def _given_back(kept: tuple[torch.Tensor, int]) -> torch.Tensor:
    tensor, version = kept
    check_version(tensor, version)
    return tensor


def check_version(tensor: torch.Tensor, version: int) -> None:
    """Refuse what was overwritten since it was saved for backward, as autograd does where no hooks stand.

    Under hooks autograd does not look, and gradients would be wrong. Remove once it does.

    Args:
        tensor (Tensor): What was saved, or shares its version.
        version (int): Its version then.

    Raises:
        RuntimeError: If the version is another now.
    """
    if tensor._version != version:
        raise RuntimeError(
            f'a tensor that is needed for backward has been modified by an inplace operation: it is at version '
            f'{tensor._version} instead of {version}. An input of a module that is recomputed is needed, too; write '
            'out of place, or leave the module out of activation_checkpointing'
        )


def version_of(tensor: torch.Tensor) -> torch.Tensor:
    """Get a tensor without memory that shares another's version, to look at once that one's memory is gone.

    Args:
        tensor (Tensor): The tensor.

    Returns:
        Tensor: An empty one.
    """
    version = tensor.detach()
    # Assigning data leaves the counter.
    version.data = version.new_empty(0)
    return version
