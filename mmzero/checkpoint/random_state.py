"""Random states of all ranks, so that a resumed run draws what the unbroken one would have drawn."""

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def random_state() -> dict[str, Any]:
    """Take this process's random states as plain values.

    Returns:
        dict: States of Python, numpy, torch and this rank's GPU where there is one.
    """
    version, numbers, gauss = random.getstate()
    legacy: Any = np.random.get_state()
    name, keys, position, has_gauss, cached = legacy
    state = dict(
        python=(version, torch.tensor(numbers, dtype=torch.int64), gauss),
        numpy=(name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        torch=torch.get_rng_state(),
    )
    if torch.cuda.is_available():
        state['cuda'] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any], data: bool = True) -> None:
    """Set this process's random states.

    Args:
        state (dict): From :func:`random_state`.
        data (bool): Also Python's and numpy's, which data pipelines draw from. Defaults to True.
    """
    torch.set_rng_state(state['torch'])
    if 'cuda' in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state['cuda'])
    if not data:
        return
    version, numbers, gauss = state['python']
    random.setstate((version, tuple(numbers.tolist()), gauss))
    name, keys, position, has_gauss, cached = state['numpy']
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))


def gather_random_states(state: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Collect every rank's random states. Collective.

    Args:
        state (dict): This rank's, from :func:`random_state`.

    Returns:
        list[dict] or None: By rank, on rank 0; None on other ranks.
    """
    states: list | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(state, states, dst=0)
    return states
