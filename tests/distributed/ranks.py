"""Running a function on several gloo ranks, each a process of its own, and getting its results back."""

import multiprocessing
import os
import queue
import socket
import traceback
from collections.abc import Callable
from typing import Any

TIMEOUT_SECONDS = 600


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    backend: str = 'gloo',
    timeout: float = TIMEOUT_SECONDS,
) -> list[Any]:
    """Run a module-level function on every rank of a fresh process group.

    Args:
        world_size (int): Number of ranks.
        function (Callable): Called with ``args`` on every rank; what it returns must be picklable.
        *args: Its arguments.
        backend (str): Backend of the process group. Defaults to 'gloo'.
        timeout (float): Seconds until the first result has to be there. Defaults to ten minutes.

    Returns:
        list: Results by rank.

    Raises:
        AssertionError: If a rank raised, with that rank's traceback, or if the ranks did not end in time.
    """
    # CUDA does not survive a fork.
    context: Any = multiprocessing.get_context('spawn' if backend == 'nccl' else 'forkserver')
    if backend != 'nccl':
        context.set_forkserver_preload(['tests.distributed.preload'])
    results: Any = context.Queue()
    port = _free_port()
    processes = [
        context.Process(
            target=_on_rank,
            args=(rank, world_size, port, backend, results, function, args, dict(os.environ)),
            daemon=True,
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        found = _collect(results, world_size, timeout)
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
    failures = [f'rank {rank}:\n{text}' for rank, (ok, text) in sorted(found.items()) if not ok]
    assert not failures, '\n'.join(failures)
    return [found[rank][1] for rank in range(world_size)]


def _collect(results: Any, world_size: int, patience: float) -> dict[int, tuple[bool, Any]]:
    found: dict[int, tuple[bool, Any]] = {}
    while len(found) < world_size:
        try:
            rank, ok, value = results.get(timeout=patience)
        except queue.Empty:
            missing = sorted(set(range(world_size)) - set(found))
            raise AssertionError(f'ranks {missing} did not end; the others: {found}') from None
        found[rank] = (ok, value)
        # Once a rank has failed, the others may wait for it in vain.
        patience = patience if ok else 10
        if not ok and len(found) < world_size:
            break
    return found


def _on_rank(
    rank: int,
    world_size: int,
    port: int,
    backend: str,
    results: Any,
    function: Callable,
    args: tuple,
    environment: dict[str, str],
) -> None:
    # The server that this was forked from has that of the first test.
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR='127.0.0.1',
        MASTER_PORT=str(port),
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if backend == 'nccl':
            torch.cuda.set_device(rank)
        dist.init_process_group(backend)
        value = function(*args)
        dist.barrier()
        dist.destroy_process_group()
        results.put((rank, True, value))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(('127.0.0.1', 0))
        return sock.getsockname()[1]
