"""Process groups, the store of a run, and DDP's arguments."""

import inspect
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, distributed_c10d
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore


def ddp_buffer_arguments(sync: bool) -> dict[str, Any]:
    """Name DDP's switch for broadcasting buffers before each forward.

    torch 2.13 renames ``broadcast_buffers`` to ``forward_sync_buffers`` and warns of the old name. Remove once the
    floor is torch 2.13.

    Args:
        sync (bool): Whether to broadcast them.

    Returns:
        dict[str, Any]: A keyword argument of DistributedDataParallel.
    """
    known = inspect.signature(DistributedDataParallel).parameters
    return {'forward_sync_buffers' if 'forward_sync_buffers' in known else 'broadcast_buffers': sync}


@contextmanager
def pretended_process_group(world_size: int) -> Iterator[None]:
    """A process group of this rank and others that are not there, in which collectives do nothing.

    What is built in it asks for the number of ranks, as in the run. Does nothing where a process group exists. Remove
    once torch's fake process group is public.

    Args:
        world_size (int): Number of ranks.

    Yields:
        None: Inside, ``torch.distributed`` is initialized.
    """
    if dist.is_initialized():
        yield
        return
    dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def broadcast_coalesced(tensors: list[torch.Tensor]) -> None:
    """Give every rank the tensors of rank 0, in place, in buckets as DDP's. Collective.

    Remove once torch has a public function that broadcasts several tensors at once.

    Args:
        tensors (list[torch.Tensor]): The same shapes and dtypes, in the same order, on every rank.
    """
    dist._broadcast_coalesced(distributed_c10d._get_default_group(), tensors, 250 * 2**20, 0)


def size_of_group(group: Any) -> int:
    """Number of ranks of a process group, as an operator was given it.

    Args:
        group (Any): A boxed ProcessGroup (``c10d`` operators), a ProcessGroup, or its name (functional ones). Remove
            once torch resolves groups in public.

    Returns:
        int: The number.
    """
    if isinstance(group, str):
        return _resolve_process_group(group).size()  # type: ignore[arg-type]
    return (group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)).size()


def default_store() -> Store:
    """Get the key-value store of the default process group. Remove once torch has a public function for it.

    Returns:
        Store: The store that all ranks share.
    """
    return distributed_c10d._get_default_store()


def group_timeout() -> timedelta:
    """How long collectives of the default process group wait. Remove once torch says it in public.

    Returns:
        timedelta: The timeout that the group was made with; torch's default where the backend does not tell.
    """
    try:
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device('cpu'))
        return backend.options._timeout
    except (AttributeError, RuntimeError):
        return dist.distributed_c10d.default_pg_timeout


def launch_of_torchrun() -> str | None:
    """Name this start of torchrun on this node, which stays the same where torchrun starts ranks again.

    The folder of its logs is made for each start; of an attempt it has a folder ``attempt_N``. Remove once torchrun
    tells ranks by which start they are.

    Returns:
        str, optional: The name; None where torchrun did not start this process, or does not say it.
    """
    found = re.fullmatch(r'(.+)/attempt_\d+/\d+/[^/]+', os.environ.get('TORCHELASTIC_ERROR_FILE', ''))
    return None if found is None else f'{os.uname().nodename}:{found[1]}'
