"""A store that holds nothing of ranks that torchrun has ended before.

[Note: what an attempt leaves behind]
With ``--max-restarts`` torchrun starts all ranks again when one has failed. Its agent keeps the store, and with it the
addresses of processes that are gone: gloo then connects to those ("Connection refused"), NCCL to the former rank 0
(pytorch#135712), and what ranks have told each other of failures, meetings and stops counts once more. The number of
restarts does not tell attempts apart, as each node's agent counts for itself. So ranks find each other under keys that
nobody has used before: each leaves its own, rank 0 answers to it with the prefix of this attempt, and asks again until
all have come, since what it reads may be of a rank that is gone.
"""

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_HELLO = 'mmzero/attempt/hello'
_PAUSE_SECONDS = 0.02


def shares_agents_store() -> bool:
    """Say whether torchrun's agent keeps the store of this run, over its restarts.

    Returns:
        bool: Whether it does.
    """
    return os.environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True'


def fresh_store(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Agree on a part of a store that no former rank has used. Collective, over the store.

    Args:
        store (Store): Which former ranks may have used.
        rank (int): This rank.
        world_size (int): Number of ranks.
        timeout (timedelta): For how long to wait for all ranks.

    Returns:
        Store: The part, the same on every rank.

    Raises:
        TimeoutError: If not all ranks come.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        _answer_all(store, own, world_size, timeout)
        return dist.PrefixStore(own, store)
    store.set(f'{_HELLO}/{rank}', own)
    store.wait([_answer_to(own)], timeout)
    prefix = store.get(_answer_to(own)).decode()
    store.add(_came(prefix), 1)
    return dist.PrefixStore(prefix, store)


def _answer_all(store: dist.Store, prefix: str, world_size: int, timeout: timedelta) -> None:
    hellos = [f'{_HELLO}/{rank}' for rank in range(1, world_size)]
    answered: set[str] = set()
    end = time.monotonic() + timeout.total_seconds()
    while store.add(_came(prefix), 0) < len(hellos):
        for hello in hellos if store.check(hellos) else [hello for hello in hellos if store.check([hello])]:
            name = store.get(hello).decode()
            if name not in answered:
                answered.add(name)
                store.set(_answer_to(name), prefix)
        if time.monotonic() > end:
            raise TimeoutError(f'{len(hellos) + 1} ranks did not all come to the store within {timeout}')
        time.sleep(_PAUSE_SECONDS)


def _answer_to(name: str) -> str:
    return f'mmzero/attempt/answer/{name}'


def _came(prefix: str) -> str:
    return f'mmzero/attempt/came/{prefix}'
