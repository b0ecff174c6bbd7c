"""Shards that lie in host memory while their ranks compute and communicate on GPUs.

[Note: shards in host memory]
Under FSDP2's ``CPUOffloadPolicy`` shards and their gradients, and with them the optimizer's state, lie on the CPU. The
mesh is one of GPUs: NCCL takes no tensor of the CPU, and DTensor moves what it is made of to the GPU. So what is to be
communicated is copied to the mesh's device first, one tensor at a time, and what is made for a parameter is put where
the parameter lies. Where ranks compute on the CPU, both are the same.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from mmzero._compat import dtensor_as_it_is, local_tensor

_KNOWN = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
)
_CARRIERS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


def device_of(mesh: DeviceMesh) -> torch.device:
    """Where the collectives of a mesh run.

    Args:
        mesh (DeviceMesh): The mesh.

    Returns:
        torch.device: This rank's device.
    """
    if mesh.device_type == 'cpu':
        return torch.device('cpu')
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def is_on_host(tensor: Tensor) -> bool:
    """Say whether a shard lies in host memory while its mesh is one of GPUs.

    Args:
        tensor (Tensor): A shard, or a whole tensor, which is none.

    Returns:
        bool: Whether it does.
    """
    return isinstance(tensor, DTensor) and tensor.device.type != tensor.device_mesh.device_type


def whole_of(tensor: DTensor) -> Tensor:
    """Gather a shard on every rank. Collective.

    Args:
        tensor (DTensor): The shard.

    Returns:
        Tensor: The whole, on the device of its mesh.
    """
    if is_on_host(tensor):
        tensor = dtensor_as_it_is(local_tensor(tensor).to(device_of(tensor.device_mesh)), tensor)
    carried = carrier_of(tensor.dtype)
    if carried is tensor.dtype:
        return tensor.full_tensor()
    return dtensor_as_it_is(local_tensor(tensor).view(carried), tensor).full_tensor().view(tensor.dtype)


def carrier_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype as which values of another one are sent, bit by bit: gloo knows neither float8 nor int16.

    Args:
        dtype (torch.dtype): That of the values.

    Returns:
        torch.dtype: One of the same size that every backend knows; itself where they know it.
    """
    return dtype if dtype in _KNOWN else _CARRIERS.get(dtype.itemsize, dtype)


def part_of(whole: Tensor, like: Any, placements: Sequence[Any] | None = None) -> Any:
    """Shard a tensor that every rank holds whole as another one is. No communication.

    Args:
        whole (Tensor): The same on every rank.
        like (DTensor): Says how, on which mesh, and where it lies.
        placements (Sequence[Placement], optional): Other ones. Defaults to None: those of ``like``.

    Returns:
        DTensor: The shard, in memory of its own.
    """
    return cut(whole, like.device_mesh, placements or like.placements, like.device)


def cut(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Any], place: torch.device) -> Any:
    """Shard a tensor that every rank holds whole. No communication.

    Args:
        whole (Tensor): The same on every rank.
        mesh (DeviceMesh): The mesh.
        placements (Sequence[Placement]): How.
        place (torch.device): Where the shard is to lie.

    Returns:
        DTensor: The shard, in memory of its own.
    """
    made: Any = distribute_tensor(whole.to(device_of(mesh)), mesh, placements, src_data_rank=None).clone()
    return made if made.device == place else dtensor_as_it_is(local_tensor(made).to(place), made)
