"""Giving every rank the weights of rank 0, one tensor at a time.

Rank 0 builds the model with real parameters on the CPU, the other ranks on the meta device, so that a node's host
memory holds about one model. Where parameters become shards, rank 0 sends each rank its own, and drops its full copy
once that is done; elsewhere every rank gets them whole.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmzero.engines.state import scatter
from mmzero.errors import PlanError

Slots = dict[int, list[tuple[nn.Module, str]]]


def check_same_model(model: nn.Module) -> None:
    """Compare names, shapes and dtypes of all tensors with rank 0's, and freeze what rank 0 has frozen. Collective.

    Some models freeze parameters in ``init_weights``, which runs on rank 0 alone.

    Args:
        model (nn.Module): The model; its parameters' ``requires_grad`` may change.

    Raises:
        PlanError: On every rank, if a rank built another model.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    mine = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]
    box = [(mine, [param.requires_grad for param in model.parameters()])]
    dist.broadcast_object_list(box, src=0)
    theirs, trained = box[0]
    fault = _difference(theirs, mine)
    faults: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    for rank, text in enumerate(faults):
        if text is not None:
            raise PlanError(f'rank {rank} built another model than rank 0: {text}; build it from the same config')
    for param, flag in zip(model.parameters(), trained, strict=True):
        param.requires_grad_(flag)


def _difference(theirs: list, mine: list) -> str | None:
    for first, second in zip(theirs, mine, strict=False):
        if first != second:
            return f'{second} instead of {first}'
    if len(theirs) != len(mine):
        return f'{len(mine)} tensors instead of {len(theirs)}'
    return None


def materialize_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers, also those in no state dict, to the device, with rank 0's values. Collective.

    Args:
        model (nn.Module): The model; its buffers are changed.
        device (torch.device): The device.
    """
    # The old buffers are kept until all are done: the id of one that is freed may serve another.
    done: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in done:
                real = _to_device(buffer, device)
                broadcast(real)
                done[id(buffer)] = (buffer, real)
            module._buffers[name] = done[id(buffer)][1]


def parameter_slots(model: nn.Module) -> Slots:
    """Find where each parameter is registered; a tied one in several places.

    Args:
        model (nn.Module): The model.

    Returns:
        dict[int, list[tuple[nn.Module, str]]]: ``id`` of a parameter to its modules and attribute names.
    """
    slots: Slots = defaultdict(list)
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                slots[id(param)].append((module, name))
    return slots


def materialize_parameters(params: Iterable[nn.Parameter], slots: Slots, device: torch.device) -> list[nn.Parameter]:
    """Make parameters real on the device, with rank 0's values. Collective.

    Args:
        params (Iterable[nn.Parameter]): The parameters of a unit, in the same order on every rank.
        slots (Slots): Where they are registered; changed there.
        device (torch.device): The device.

    Returns:
        list[nn.Parameter]: The new parameters.
    """
    made = allocate_parameters(params, slots, device)
    for param in made:
        broadcast(param)
    return made


def allocate_parameters(params: Iterable[nn.Parameter], slots: Slots, device: torch.device) -> list[nn.Parameter]:
    """Make parameters real on the device, on rank 0 alone with their values. Without communication.

    Memory: on a CPU, what nobody has written to yet takes none.

    Args:
        params (Iterable[nn.Parameter]): The parameters of a unit.
        slots (Slots): Where they are registered; changed there.
        device (torch.device): The device.

    Returns:
        list[nn.Parameter]: The new parameters.
    """
    made = []
    for param in params:
        real = nn.Parameter(_to_device(param.detach(), device), requires_grad=param.requires_grad)
        real.__dict__.update(vars(param))
        for module, name in slots[id(param)]:
            module._parameters[name] = real
        made.append(real)
    return made


def fill_shards(places: Sequence[tuple[nn.Module, str]], full: list[Tensor]) -> None:
    """Send the values of parameters to where their shards are, one after the other. Collective.

    Args:
        places (Sequence[tuple[nn.Module, str]]): Modules and names under which the parameters are registered.
        full (list[Tensor]): Their values on rank 0; on other ranks only shapes count. It is emptied, so that each is
            let go of.
    """
    for module, name in places:
        target: Any = module._parameters[name]
        scatter(target, full.pop(0))


def materialize_model(model: nn.Module, device: torch.device) -> None:
    """Make a whole model real on the device, with rank 0's values. Collective.

    Args:
        model (nn.Module): The model, real on rank 0; its parameters and buffers are changed.
        device (torch.device): The device.

    Raises:
        PlanError: On every rank, if a rank built another model.
    """
    check_same_model(model)
    materialize_buffers(model, device)
    params = [param for _, param in model.named_parameters()]
    materialize_parameters(params, parameter_slots(model), device)


def broadcast(tensor: Tensor) -> None:
    """Fill a tensor with rank 0's values. Collective.

    Args:
        tensor (Tensor): Real on every rank; changed in place.
    """
    # As bytes: backends do not know every dtype.
    dist.broadcast(tensor.detach().reshape(-1).view(torch.uint8), src=0)


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    # Laid out the same on every rank: what comes is rank 0's memory, as it lies.
    if tensor.is_meta:
        return torch.empty_like(tensor, device=device, memory_format=torch.contiguous_format)
    return tensor.to(device).contiguous()
