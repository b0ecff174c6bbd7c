"""CUDA's allocator, and what the profiler has seen of memory."""

from typing import Any

import torch


def use_expandable_segments() -> None:
    """Let CUDA's allocator grow its segments, as ``PYTORCH_ALLOC_CONF=expandable_segments:True`` does from outside.

    What was allocated before stays where it is. Remove once torch has a public function for it.
    """
    torch._C._accelerator_setAllocatorSettings('expandable_segments:True')


def profiled_events(profile: Any) -> list[Any]:
    """The outermost events of a profile, each with its children, allocations among them.

    ``torch.profiler`` has no public way to the single allocations; ``export_memory_timeline`` gives sums only.

    Args:
        profile (torch.profiler.profile): Ended.

    Returns:
        list: Events with ``tag``, ``name``, ``start_time_ns``, ``children`` and, for allocations, ``extra_fields``.
    """
    return profile.profiler.kineto_results.experimental_event_tree()
