"""Full tensors on rank 0's CPU from shards, and back, one tensor at a time. Every function here is collective."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from mmzero.engines.meeting import meet
from mmzero.errors import CheckpointError

Whole = Callable[[Any], AbstractContextManager]
"""Makes a tensor whole on every rank, for engines whose shards are not DTensors."""


def gather(tensor: Tensor) -> Tensor | None:
    """Gather one tensor.

    Args:
        tensor (Tensor): A shard (DTensor), or a tensor that every rank holds whole.

    Returns:
        Tensor or None: The full tensor on rank 0's CPU; None on other ranks.
    """
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    # cpu() of a CPU tensor is the tensor itself, which the next step would change.
    return full.detach().cpu().clone() if dist.get_rank() == 0 else None


def scatter(target: Tensor, full: Tensor | None) -> None:
    """Fill a tensor on every rank from rank 0's full one.

    Args:
        target (Tensor): A shard, or a tensor that every rank holds whole; changed in place.
        full (Tensor, optional): The full tensor on rank 0; ignored on other ranks.
    """
    target = target.detach()
    device = target.to_local().device if isinstance(target, DTensor) else target.device
    if dist.get_rank() == 0 and full is not None:
        whole = full.to(device=device, dtype=target.dtype).contiguous()
    else:
        whole = torch.empty(target.shape, dtype=target.dtype, device=device)
    if isinstance(target, DTensor):
        target.copy_(distribute_tensor(whole, target.device_mesh, target.placements))
    else:
        dist.broadcast(whole, src=0)
        target.copy_(whole)


def gather_tensors(tensors: dict[str, Tensor], whole: Whole = nullcontext) -> dict[str, Tensor]:
    """Gather named tensors.

    Args:
        tensors (dict[str, Tensor]): The same names, in the same order, on every rank.
        whole (Whole): Context in which a tensor is read. Defaults to none.

    Returns:
        dict[str, Tensor]: Full CPU tensors on rank 0; empty on other ranks.
    """
    meet("gather the model's weights")
    gathered = {}
    for name, tensor in tensors.items():
        # A module's extra state may be anything; rank 0's is kept.
        is_tensor = isinstance(tensor, Tensor)
        with whole(tensor):
            full = gather(tensor) if is_tensor else (tensor if dist.get_rank() == 0 else None)
        if full is not None:
            gathered[name] = full
    return gathered


def scatter_tensors(targets: dict[str, Tensor], full: dict[str, Tensor], whole: Whole = nullcontext) -> None:
    """Fill those of the named tensors that rank 0 has.

    Args:
        targets (dict[str, Tensor]): The same names, in the same order, on every rank; changed in place.
        full (dict[str, Tensor]): Full tensors on rank 0; ignored on other ranks.
        whole (Whole): Context in which a tensor is written. Defaults to none.
    """
    meet("load the model's weights")
    names = [[name for name, target in targets.items() if name in full and isinstance(target, Tensor)]]
    dist.broadcast_object_list(names, src=0)
    for name in names[0]:
        with whole(targets[name]):
            scatter(targets[name], full.get(name))


def gather_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Gather an optimizer's state in the layout of ``Optimizer.state_dict()`` of the unsharded optimizer.

    Args:
        optimizer (Optimizer): The optimizer on sharded parameters.

    Returns:
        dict: On rank 0 ``state`` and ``param_groups``; empty on other ranks.
    """
    meet("gather the optimizer's state")
    packed = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    for index in sorted(packed['state']):
        entries = packed['state'][index]
        state[index] = {name: gather(value) if isinstance(value, Tensor) else value for name, value in entries.items()}
    return dict(state=state, param_groups=packed['param_groups']) if dist.get_rank() == 0 else {}


def scatter_optimizer(optimizer: Optimizer, full: dict[str, Any]) -> None:
    """Fill an optimizer's state from the full one of rank 0.

    Args:
        optimizer (Optimizer): The optimizer on sharded parameters; changed in place.
        full (dict): ``Optimizer.state_dict()`` of an unsharded optimizer on rank 0; ignored on other ranks.

    Raises:
        CheckpointError: On every rank, if the groups do not fit.
    """
    meet("load the optimizer's state")
    box = [_describe(full)] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(box, src=0)
    layout, groups = box[0]  # type: ignore[misc]
    _check_groups(optimizer, groups)
    params = [param for group in optimizer.param_groups for param in group['params']]
    state: dict[int, dict[str, Any]] = {}
    for index, entries in layout.items():
        state[index] = {}
        for name, entry in entries.items():
            source = full['state'][index][name] if dist.get_rank() == 0 else None
            state[index][name] = _scatter_entry(params[index], entry, source)
    optimizer.load_state_dict(dict(state=state, param_groups=groups))


def _describe(full: dict[str, Any]) -> tuple[dict, list]:
    """Everything but the tensors, which are named by shape and dtype."""
    layout = {
        index: {
            name: (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
            for name, value in entries.items()
        }
        for index, entries in sorted(full['state'].items())
    }
    return layout, full['param_groups']


def _scatter_entry(param: Tensor, entry: Any, source: Tensor | None) -> Any:
    if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], torch.dtype)):
        return entry
    shape, dtype = entry
    if shape == tuple(param.shape) and isinstance(param, DTensor):
        target = torch.zeros_like(param, dtype=dtype, requires_grad=False)
    else:
        # Step counters and the like: whole on every rank. torch keeps them on the CPU unless capturable.
        target = torch.zeros(shape, dtype=dtype, device=param.device if shape else 'cpu')
    if target.device.type == 'cpu' and dist.get_backend() == 'nccl':
        box = [source]
        dist.broadcast_object_list(box, src=0)
        return box[0]
    scatter(target, source)
    return target


def _check_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    have = [len(group['params']) for group in optimizer.param_groups]
    saved = [len(group['params']) for group in groups]
    if have != saved:
        raise CheckpointError(
            f'the checkpoint holds an optimizer with {len(saved)} groups and {sum(saved)} parameters, this run has '
            f'{len(have)} groups and {sum(have)}; resume with the optim_wrapper that it was saved with, or start '
            'from the weights alone by load_from without resume'
        )
