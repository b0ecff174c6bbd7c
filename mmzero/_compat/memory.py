"""The allocators of CUDA and of the host, and what the profiler has seen of memory."""

import ctypes
import sys
from typing import Any

import torch


def use_expandable_segments() -> None:
    """Let CUDA's allocator grow its segments, as ``PYTORCH_ALLOC_CONF=expandable_segments:True`` does from outside.

    What was allocated before stays where it is. Remove once torch has a public function for it.
    """
    torch._C._accelerator_setAllocatorSettings('expandable_segments:True')


def return_freed_memory() -> None:
    """Give the kernel back what glibc keeps of freed host memory; does nothing with another C library.

    glibc grows the size from which on it maps blocks one by one up to 32 MiB, so that most of a model's weights lie in
    its heap, of which it gives back only the end. Remove once torch has a function for it.
    """
    trim = getattr(ctypes.CDLL(None), 'malloc_trim', None) if sys.platform == 'linux' else None
    if trim is not None:
        trim(ctypes.c_size_t(0))


def profiled_events(profile: Any) -> list[Any]:
    """The outermost events of a profile, each with its children, allocations among them.

    ``torch.profiler`` has no public way to the single allocations; ``export_memory_timeline`` gives sums only.

    Args:
        profile (torch.profiler.profile): Ended.

    Returns:
        list: Events with ``tag``, ``name``, ``start_time_ns``, ``children`` and, for allocations, ``extra_fields``.
    """
    return profile.profiler.kineto_results.experimental_event_tree()
