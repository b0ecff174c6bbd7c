"""Where a step makes the host wait for the device: what would be a sync on a GPU, told without one."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmzero._compat import TorchFunctionMode

# The host needs the result, a value or a size, before it can go on.
_SYNCS = {'_local_scalar_dense', 'nonzero', 'masked_select', 'equal', '_unique2', 'unique_consecutive', 'unique_dim'}
# So it is with an index that is a mask.
_INDEXING = {'index', 'index_put', 'index_put_', '_index_put_impl_', '_unsafe_index'}
_COPIES = {'_to_copy', 'copy_'}
# On tensors of the host these leave no operator behind; on a device they would wait for it.
_TO_HOST = {Tensor.cpu: 'cpu', Tensor.tolist: 'tolist', Tensor.numpy: 'numpy'}


def sync_of(name: str, args: tuple, kwargs: dict[str, Any]) -> str | None:
    """Tell whether an operator makes the host wait.

    Without an accelerator, tensors of the host are looked at as if they were on one.

    Args:
        name (str): Name of an ``aten`` operator.
        args (tuple): Its arguments.
        kwargs (dict[str, Any]): Its keyword arguments.

    Returns:
        str: What to count it as: the operator's name, 'mask' for an index that is one, 'copy'; None if it does not.
    """
    if name in _SYNCS:
        return name if _may_wait(args[0]) else None
    if name in _INDEXING:
        masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
        return 'mask' if any(_may_wait(mask) for mask in masks) else None
    return 'copy' if name in _COPIES and _is_waited_for(name, args, kwargs) else None


class HostMethodLog(TorchFunctionMode):
    """Counts methods that take a tensor to the host, where they leave no operator behind: on tensors of the host.

    Args:
        syncs (Counter[str]): Added to, by the method's name.
    """

    def __init__(self, syncs: Counter[str]) -> None:
        super().__init__()
        self.syncs = syncs

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See :class:`torch.overrides.TorchFunctionMode`."""
        if func in _TO_HOST and args[0].device.type == 'cpu' and _may_wait(args[0]):
            self.syncs[_TO_HOST[func]] += 1
        return func(*args, **(kwargs or {}))


def _may_wait(tensor: Tensor) -> bool:
    return tensor.device.type not in ('cpu', 'meta') or not torch.accelerator.is_available()


def _is_waited_for(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a copy goes between host and device, and blocks."""
    if name == 'copy_':
        target, source = args[0].device, args[1].device
        asynchronous = args[2] if len(args) > 2 else kwargs.get('non_blocking', False)
    else:
        source = args[0].device
        target = torch.device(kwargs.get('device') or source)
        asynchronous = kwargs.get('non_blocking', False)
    kinds = {target.type, source.type}
    return not asynchronous and 'cpu' in kinds and len(kinds - {'meta'}) > 1


_RUNTIME_SYNCS = {'cudaStreamSynchronize', 'cudaDeviceSynchronize', 'cudaEventSynchronize'}


def runtime_syncs(run: Callable[[], Any]) -> dict[str, int]:
    """Count waits that CUDA itself reports while something runs.

    Args:
        run (Callable[[], Any]): What to run.

    Returns:
        dict[str, int]: Numbers by the function of the CUDA runtime; empty without a GPU, where nothing is run.
    """
    if not torch.cuda.is_available():
        return {}
    torch.cuda.synchronize()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        run()
    # Leaving the profiler waits for the device once; that comes after its last event.
    return dict(Counter(event.name for event in profile.events() if event.name in _RUNTIME_SYNCS))
