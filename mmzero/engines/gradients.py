"""What a step needs to know of all gradients together: whether they are finite, which are not, norms of parts."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.utils import get_total_norm


def local_gradient(param: Tensor) -> Tensor | None:
    """This rank's part of a gradient.

    Args:
        param (Tensor): A parameter: a shard, or whole on every rank.

    Returns:
        Tensor or None: The part; empty where the rank's shard is.
    """
    grad: Any = param.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


def any_nonfinite(params: Sequence[nn.Parameter], device: torch.device, sharded: bool) -> Tensor:
    """Say whether a gradient of any rank holds nan or inf. Does not wait for the device.

    Args:
        params (Sequence[nn.Parameter]): Parameters.
        device (torch.device): Where this rank computes.
        sharded (bool): Whether ranks hold different gradients; then collective, one all-reduce of a scalar.

    Returns:
        Tensor: 0-dim, 1 if so, else 0.
    """
    local = [grad for grad in map(local_gradient, params) if grad is not None and grad.numel()]
    largest = get_total_norm(local, math.inf) if local else torch.zeros((), device=device)
    # Whether MAX hands on a NaN is up to the backend.
    found = (~torch.isfinite(largest)).float().to(device)
    if sharded:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found


def describe_nonfinite(names: Mapping[Tensor, str], device: torch.device, losses: Sequence[Tensor]) -> str:
    """Say which gradients are not finite, and on which ranks the loss is not. Collective; waits for the device.

    Args:
        names (Mapping[Tensor, str]): Parameters to their names, in the model's order, alike on every rank.
        device (torch.device): Where this rank computes.
        losses (Sequence[Tensor]): This rank's losses since the last step.

    Returns:
        str: The same on every rank.
    """
    found = torch.stack([_fault(local_gradient(param), device) for param in names])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    bad = [(name, _FAULTS[code]) for name, code in zip(names.values(), found.tolist(), strict=True) if code]
    return f'{_told_parameters(bad, len(names))}; {describe_losses(losses)}'


def describe_losses(losses: Sequence[Tensor]) -> str:
    """Say on which ranks the loss is not finite. Collective; waits for the device.

    Args:
        losses (Sequence[Tensor]): This rank's losses since the last step.

    Returns:
        str: The same on every rank.
    """
    values = [float(loss) for loss in losses]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, values)
    return _told_losses(everyones)


_FAULTS = {1: 'inf', 2: 'nan'}


def _fault(grad: Tensor | None, device: torch.device) -> Tensor:
    """0 for a finite gradient, 1 if it holds inf, 2 if nan."""
    if grad is None or not grad.numel():
        return torch.zeros((), dtype=torch.int32, device=device)
    return torch.where(grad.isnan().any(), 2, grad.isinf().any().int()).to(device, torch.int32)


def _told_parameters(bad: list[tuple[str, str]], count: int) -> str:
    if not bad:
        return f'their norm is not finite, though each of {count} gradients is'
    # Backward comes to what is registered last first, and spoils all that is before.
    name, fault = bad[-1]
    return (
        f'{len(bad)} of {count} parameters have a gradient that is not finite, the first in backward {name} ({fault})'
    )


def _told_losses(everyones: list[list[float]]) -> str:
    bad = {
        rank: next(value for value in values if not math.isfinite(value))
        for rank, values in enumerate(everyones)
        if not all(map(math.isfinite, values))
    }
    if not bad:
        return 'the loss is finite on every rank'
    shown = ', '.join(f'{value} on rank {rank}' for rank, value in list(bad.items())[:8])
    return f'the loss is {shown}' + (f' and {len(bad) - 8} more ranks' if len(bad) > 8 else '')


def norms_by_part(
    parts: Mapping[str, Sequence[nn.Parameter]], norm_type: float, device: torch.device
) -> dict[str, Tensor]:
    """Norms of the gradients of parts of a model, as an unsharded one would have them.

    Communication: one all-reduce of a number per part and mesh. Does not wait for the device.

    Args:
        parts (Mapping[str, Sequence[nn.Parameter]]): Names to parameters.
        norm_type (float): p of the p-norm.
        device (torch.device): Where this rank computes.

    Returns:
        dict[str, Tensor]: Names to norms, 0-dim, the same on every rank; 0 for a part without gradients.
    """
    meshes = dict.fromkeys(_mesh_of(param) for params in parts.values() for param in params)
    sums = [_summed(parts, mesh, norm_type, device) for mesh in meshes]
    if not sums:
        return {}
    joined = torch.stack(sums)
    norms = joined.amax(0) if math.isinf(norm_type) else joined.sum(0).pow(1 / norm_type)
    return dict(zip(parts, norms.unbind(), strict=True))


def _mesh_of(param: nn.Parameter) -> tuple[Any, tuple[bool, ...]] | None:
    """The mesh of a shard, and which of its dimensions split it."""
    if not isinstance(param, DTensor):
        return None
    return param.device_mesh, tuple(placement.is_shard() for placement in param.placements)


def _summed(parts: Mapping[str, Sequence[nn.Parameter]], mesh: Any, norm_type: float, device: torch.device) -> Tensor:
    """Sums of |x|^p, or the largest |x|, over the gradients on one mesh: one number per part, of all ranks."""
    sums = []
    for params in parts.values():
        local = [local_gradient(param) for param in params if _mesh_of(param) == mesh]
        grads = [grad for grad in local if grad is not None and grad.numel()]
        norm = get_total_norm(grads, norm_type).to(device, torch.float32) if grads else torch.zeros((), device=device)
        sums.append(norm if math.isinf(norm_type) else norm.pow(norm_type))
    stacked = torch.stack(sums)
    if mesh is None:
        return stacked
    how: Any = Partial('max' if math.isinf(norm_type) else 'sum')
    placements = [how if split else Replicate() for split in mesh[1]]
    return DTensor.from_local(stacked, mesh[0], placements, run_check=False).full_tensor()
