"""The optimizer's step on shards in host memory: by torch's fused kernels for the CPU, where they do the same."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

FUSED = (Adam, AdamW, Adagrad, SGD)
"""torch's optimizers that have a fused kernel for the CPU; subclasses may do more than the kernel."""


def step_on_host(step: Callable[..., Any], optimizer: Optimizer, **kwargs: Any) -> None:
    """Step an optimizer whose shards lie in host memory.

    Args:
        step (Callable): Steps it.
        optimizer (Optimizer): The optimizer.
        **kwargs: As ``step`` takes them.
    """
    with _fused(optimizer):
        step(**kwargs)


@contextmanager
def _fused(optimizer: Optimizer) -> Iterator[None]:
    """Take the fused kernel for the time of a step, where nobody has chosen another way.

    On a CPU torch goes tensor by tensor and operator by operator by itself. Groups are as before afterwards, so that a
    checkpoint does not tell where the shards were.
    """
    fused = [group for group in optimizer.param_groups if _may_be_fused(optimizer, group)]
    for group in fused:
        group['fused'] = True
        _move_counters(optimizer, group)
    try:
        yield
    finally:
        for group in fused:
            group['fused'] = None


def _may_be_fused(optimizer: Optimizer, group: dict) -> bool:
    # False is a choice as well.
    has_chosen = any(group.get(name) is not None for name in ('fused', 'foreach'))
    return type(optimizer) in FUSED and not has_chosen and not group.get('differentiable')


def _move_counters(optimizer: Optimizer, group: dict) -> None:
    """Put counters of steps beside parameters that stayed on the GPU: a fused kernel wants them there."""
    for param in group['params']:
        entries = optimizer.state.get(param) if not isinstance(param, DTensor) else None
        if entries and isinstance(entries.get('step'), torch.Tensor):
            entries['step'] = entries['step'].to(param.device)


def few_threads(ranks_on_host: int) -> str | None:
    """Say that most cores of the host will not step.

    Args:
        ranks_on_host (int): Ranks that share its cores.

    Returns:
        str, optional: The sentence; None where threads are enough.
    """
    threads, cores = torch.get_num_threads(), (os.cpu_count() or 1) // ranks_on_host
    if threads > 1 or cores < 2:
        return None
    return (
        f'steps in host memory on 1 thread per rank, which has {cores} cores to itself: set OMP_NUM_THREADS={cores}, '
        'which torchrun sets to 1 where it is not set'
    )
