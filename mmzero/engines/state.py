"""Full tensors on rank 0's CPU from shards, and back, one tensor at a time. Every function here is collective."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from mmzero._compat import local_tensor
from mmzero.engines.meeting import meet
from mmzero.engines.on_host import carrier_of, device_of, whole_of
from mmzero.errors import CheckpointError

ADVICE = (
    'resume with the model and the optim_wrapper that it was saved with, or start from the weights alone by load_from '
    'without resume'
)
# State of these names has its parameter's shape, in torch's optimizers and those that follow them.
SHAPED = ('exp_avg', 'exp_avg_sq', 'max_exp_avg_sq', 'momentum_buffer', 'square_avg', 'exp_inf', 'acc_delta')


def gather(tensor: Tensor) -> Tensor | None:
    """Gather one tensor.

    Args:
        tensor (Tensor): A shard (DTensor), or a tensor that every rank holds whole.

    Returns:
        Tensor or None: The full tensor on rank 0's CPU; None on other ranks.
    """
    full = whole_of(tensor) if isinstance(tensor, DTensor) else tensor
    # cpu() of a CPU tensor is the tensor itself, which the next step would change.
    return full.detach().cpu().clone() if dist.get_rank() == 0 else None


def scatter(target: Tensor, full: Tensor | None) -> None:
    """Fill a tensor on every rank from rank 0's full one.

    Args:
        target (Tensor): A shard, or a tensor that every rank holds whole; changed in place.
        full (Tensor, optional): The full tensor on rank 0; ignored on other ranks.
    """
    target = target.detach()
    device = device_of(target.device_mesh) if isinstance(target, DTensor) else target.device
    if dist.get_rank() == 0 and full is not None:
        whole = full.to(device=device, dtype=target.dtype).contiguous()
    else:
        whole = torch.empty(target.shape, dtype=target.dtype, device=device)
    sent = whole.view(carrier_of(whole.dtype))
    if isinstance(target, DTensor):
        made = distribute_tensor(sent, target.device_mesh, target.placements)
        local_tensor(target).copy_(local_tensor(made).view(target.dtype))
    else:
        dist.broadcast(sent, src=0)
        target.copy_(whole)


def gather_tensors(
    tensors: dict[str, Tensor], one: Callable[[str, Tensor], Tensor | None] = lambda name, tensor: gather(tensor)
) -> dict[str, Tensor]:
    """Gather named tensors.

    Args:
        tensors (dict[str, Tensor]): The same names, in the same order, on every rank.
        one (Callable[[str, Tensor], Tensor or None]): Gathers one, of its name. Defaults to :func:`gather`.

    Returns:
        dict[str, Tensor]: Full CPU tensors on rank 0; empty on other ranks.
    """
    meet("gather the model's weights")
    gathered = {}
    for name, tensor in tensors.items():
        # A module's extra state may be anything; rank 0's is kept.
        own = tensor if dist.get_rank() == 0 else None
        full = one(name, tensor) if isinstance(tensor, Tensor) else own
        if full is not None:
            gathered[name] = full
    return gathered


def scatter_tensors(
    targets: dict[str, Tensor],
    full: dict[str, Tensor],
    one: Callable[[str, Tensor, Tensor | None], None] = lambda name, target, source: scatter(target, source),
) -> None:
    """Fill those of the named tensors that rank 0 has.

    Args:
        targets (dict[str, Tensor]): The same names, in the same order, on every rank; changed in place.
        full (dict[str, Tensor]): Full tensors on rank 0; ignored on other ranks.
        one (Callable[[str, Tensor, Tensor or None], None]): Fills one, of its name, with rank 0's. Defaults to
            :func:`scatter`.
    """
    meet("load the model's weights")
    names = [[name for name, target in targets.items() if name in full and isinstance(target, Tensor)]]
    dist.broadcast_object_list(names, src=0)
    for name in names[0]:
        one(name, targets[name], full.get(name))


def gather_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Gather an optimizer's state in the layout of ``Optimizer.state_dict()`` of the unsharded optimizer.

    Args:
        optimizer (Optimizer): The optimizer on sharded parameters.

    Returns:
        dict: On rank 0 ``state`` and ``param_groups``; empty on other ranks.
    """
    meet("gather the optimizer's state")
    packed = optimizer.state_dict()
    shards = shards_everywhere(packed['state'])
    # What else some optimizers save comes along.
    full = dict(packed, state={}, param_groups=[_gather_nested(group) for group in packed['param_groups']])
    for index in sorted(packed['state'], key=_by_index):
        full['state'][index] = {
            name: _gather_nested(value if (index, name) in shards else own_part(value))
            for name, value in packed['state'][index].items()
        }
    return full if dist.get_rank() == 0 else {}


def shards_everywhere(state: dict[Any, dict[str, Any]]) -> set[tuple[Any, str]]:
    """Entries of the state that are shards on all ranks, so that gathering them is collective.

    Where a weight has fewer rows than there are ranks, a counter of one element has the shape of some ranks' shards.

    Args:
        state (dict): An optimizer's packed state.

    Returns:
        set[tuple]: Pairs of a parameter's index and an entry's name, the same on every rank.

    Raises:
        CheckpointError: On every rank, if not all of them hold the same entries.
    """
    own = {
        (index, name): isinstance(value, DTensor) for index, entries in state.items() for name, value in entries.items()
    }
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    names = {name for theirs in everyones for name in theirs}
    for index, name in sorted(names, key=str):
        without = [rank for rank, theirs in enumerate(everyones) if (index, name) not in theirs]
        if without:
            raise CheckpointError(
                f"the optimizer's state cannot be saved: rank {without[0]} has no {name!r} of parameter {index}, "
                'others have; an optimizer has to make the same state on every rank, also of shards without elements'
            )
    return {name for name in names if all(theirs[name] for theirs in everyones)}


def own_part(value: Any) -> Any:
    """This rank's part of what is a shard.

    Args:
        value (Any): A shard, or anything else.

    Returns:
        Any: A plain tensor, or the value itself.
    """
    return value.to_local() if isinstance(value, DTensor) else value


def _gather_nested(value: Any) -> Any:
    """Gather the tensors of one value, also in a dict of a group or of quantised state."""
    if isinstance(value, dict):
        return {key: _gather_nested(item) for key, item in value.items()}
    return gather(value) if isinstance(value, Tensor) else value


def _by_index(key: Any) -> tuple:
    """The order of parameters; keys that are none last."""
    return (not isinstance(key, int), key if isinstance(key, int) else str(key))


def scatter_optimizer(optimizer: Optimizer, full: dict[str, Any], names: list[list[str]]) -> None:
    """Fill an optimizer's state from the full one of rank 0, once ranks have met to do so.

    Args:
        optimizer (Optimizer): The optimizer on sharded parameters; changed in place.
        full (dict): ``Optimizer.state_dict()`` of an unsharded optimizer on rank 0, with or without ``param_names``;
            ignored on other ranks.
        names (list[list[str]]): :func:`group_names` of this run.

    Raises:
        CheckpointError: On every rank, if the groups do not fit.
    """
    box = [described_state(full)] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(box, src=0)
    described: dict[str, Any] = box[0]  # type: ignore[assignment]
    groups = described['param_groups']
    check_groups(optimizer, groups)
    check_names(described.pop('param_names', names), names)
    params = [param for group in optimizer.param_groups for param in group['params']]
    _check_shapes(params, described['state'])
    state: dict[Any, dict[str, Any]] = {}
    for index, entries in described['state'].items():
        own = params[index] if isinstance(index, int) else None
        state[index] = {}
        for name, entry in entries.items():
            source = full['state'][index][name] if dist.get_rank() == 0 else None
            state[index][name] = _scatter_entry(own, entry, source) if isinstance(entry, Whole) else entry
    groups = [on_devices_of(group, own) for group, own in zip(groups, optimizer.param_groups, strict=True)]
    load_packed(optimizer, dict(described, state=state, param_groups=groups))


def load_packed(optimizer: Optimizer, packed: dict[str, Any]) -> None:
    """Load what is there on this rank, and refuse what another optimizer has saved.

    Args:
        optimizer (Optimizer): This run's; changed in place.
        packed (dict): As ``Optimizer.load_state_dict`` takes it, with shards where parameters are.

    Raises:
        CheckpointError: If groups lack what this optimizer needs.
    """
    # torch adds to the defaults when it loads.
    wanted = [key for key in optimizer.defaults if all(key in group for group in optimizer.param_groups)]
    try:
        optimizer.load_state_dict(packed)
        # Fields that are newer than the checkpoint its class has added by now.
        missing = [key for key in wanted if any(key not in group for group in optimizer.param_groups)]
    except KeyError as error:
        missing = [str(error.args[0])]
    refuse_other(optimizer, missing)


def refuse_other(optimizer: Optimizer, missing: Sequence[str]) -> None:
    """Refuse the state of another optimizer.

    Args:
        optimizer (Optimizer): This run's.
        missing (Sequence[str]): What its groups have and those that were saved have not.

    Raises:
        CheckpointError: If there is any.
    """
    if missing:
        raise CheckpointError(
            f"the checkpoint holds another optimizer than this run's {type(optimizer).__name__}: it has no "
            f'{", ".join(map(repr, missing))}; {ADVICE}'
        )


@dataclass(frozen=True)
class Whole:
    """What stands for a tensor that comes by itself.

    Args:
        shape (tuple[int, ...]): Its shape.
        dtype (torch.dtype): Its dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


def _is_plain_tensor(value: Any) -> bool:
    """Quantised ones, which are subclasses, are sent as they are."""
    return type(value) is Tensor


def described_state(full: dict[str, Any], is_apart: Callable[[Any], bool] = _is_plain_tensor) -> dict[str, Any]:
    """Copy an optimizer's state without tensors that come by themselves.

    Args:
        full (dict): With ``state``.
        is_apart (Callable[[Any], bool]): Which of its values are such tensors. Defaults to all plain ones.

    Returns:
        dict: With :class:`Whole` in the place of these.
    """
    state = {
        index: {
            name: Whole(tuple(value.shape), value.dtype) if is_apart(value) else value
            for name, value in entries.items()
        }
        for index, entries in sorted(full['state'].items(), key=lambda item: _by_index(item[0]))
    }
    return dict(full, state=state)


def _scatter_entry(param: Any, entry: Whole, source: Tensor | None) -> Any:
    device = 'cpu' if param is None else param.device
    if param is not None and entry.shape == tuple(param.shape) and isinstance(param, DTensor):
        target: Tensor = torch.zeros_like(param, dtype=entry.dtype, requires_grad=False)
    else:
        # Step counters, factors of a matrix and the like: whole on every rank. torch keeps 0-dim ones on the CPU unless
        # capturable.
        target = torch.zeros(entry.shape, dtype=entry.dtype, device=device if entry.shape else 'cpu')
    if not isinstance(target, DTensor) and target.device.type == 'cpu' and dist.get_backend() == 'nccl':
        box = [source]
        dist.broadcast_object_list(box, src=0)
        return box[0]
    scatter(target, source)
    return target


def on_devices_of(group: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Put tensors of a saved group, such as lr, where those of this run's group are.

    Args:
        group (dict): The saved group.
        own (dict): This run's.

    Returns:
        dict: The saved group, with tensors on the devices of this run's.
    """
    return {
        key: value.to(own[key].device) if isinstance(value, Tensor) and isinstance(own.get(key), Tensor) else value
        for key, value in group.items()
    }


def check_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Refuse a checkpoint with other numbers of groups or of parameters.

    Args:
        optimizer (Optimizer): This run's.
        groups (list[dict]): Those that were saved.

    Raises:
        CheckpointError: If they differ, with the first that does.
    """
    have = [len(group['params']) for group in optimizer.param_groups]
    saved = [len(group['params']) for group in groups]
    if have != saved:
        raise CheckpointError(
            f'the checkpoint holds an optimizer with {len(saved)} groups and {sum(saved)} parameters, this run has '
            f'{len(have)} groups and {sum(have)}{_first_size(saved, have)}; {ADVICE}'
        )


def _first_size(saved: list[int], have: list[int]) -> str:
    """Where two lists of equal length differ."""
    if len(saved) != len(have):
        return ''
    index = next(i for i, (a, b) in enumerate(zip(saved, have, strict=True)) if a != b)
    return f' (group {index} has {saved[index]} there, {have[index]} here)'


def _check_shapes(params: list[Tensor], state: dict[Any, dict[str, Any]]) -> None:
    for index, entries in state.items():
        for name in SHAPED:
            entry = entries.get(name)
            if isinstance(index, int) and isinstance(entry, Whole) and entry.shape != tuple(params[index].shape):
                raise CheckpointError(
                    f"{name} of parameter {index} of the checkpoint's optimizer has shape {entry.shape}, the parameter "
                    f'{tuple(params[index].shape)}: the order of parameters is another one; {ADVICE}'
                )


def group_names(optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Name the parameters of each group, in their order.

    Args:
        optimizer (Optimizer): The optimizer.
        named (Mapping[str, nn.Parameter]): The model's parameters, of which it has some.

    Returns:
        list[list[str]]: Names by group.
    """
    names = {id(param): name for name, param in named.items()}
    return [[names.get(id(param), '') for param in group['params']] for group in optimizer.param_groups]


def check_names(saved: list[list[str]], ours: list[list[str]]) -> None:
    """Refuse a checkpoint whose groups have other parameters, or have them in another order.

    Args:
        saved (list[list[str]]): :func:`group_names` when it was saved.
        ours (list[list[str]]): Those of this run.

    Raises:
        CheckpointError: If they differ, with the first that does.
    """
    for index, (theirs, own) in enumerate(zip(saved, ours, strict=False)):
        for there, here in zip(theirs, own, strict=False):
            if there != here:
                raise CheckpointError(
                    f"group {index} of the checkpoint's optimizer has {there!r} where this run's has {here!r}; {ADVICE}"
                )
