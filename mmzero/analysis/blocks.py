"""Blocks of memory over time, from the allocator events that torch's profiler records.

[Note: whose block it is]
The profiler knows when each block was allocated and freed, and within which operation, but not what it is for. Three
sources tell: the names of FSDP2's own ``record_function`` regions (what it allocates while copying out of an
all-gather is a gathered parameter); notes that hooks leave in the stream of events while a step runs (this address is
a gradient now); and the storages that parameters, gradients and the optimizer's state hold before and after.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mmzero._compat import profiled_events

NOTE = 'mmzero::note'
"""Name of the ``record_function`` region that stands for a note, in the order in which notes were left."""

OTHER = 'activations and other'

# Innermost region first decides. 'c10d::' are a backend's own copies, such as gloo's: NCCL has none.
_REGIONS = (
    ('c10d::', 'backend'),
    ('_c10d_functional::', 'backend'),
    # Workspace of kernels: CPUs cast gradients one by one on their way into the buffer.
    ('fsdp::', OTHER),
    ('FSDP::all_gather_copy_out', 'gathered'),
    ('FSDP::all_gather', 'in flight'),
    ('FSDP::post_backward_reduce', 'in flight'),
    ('FSDP::post_backward_reshard', 'gradients'),
    # A group of one gathers by a copy, within the hook itself.
    ('FSDP::pre_forward', 'gathered'),
    ('FSDP::pre_backward', 'gathered'),
    # What is resharded to part of the ranks.
    ('FSDP::post_forward', 'gathered'),
    ('FSDP::', OTHER),
)


@dataclass
class Block:
    """A block of memory.

    Args:
        address (int): Where it starts.
        size (int): Bytes.
        category (str): What it is for.
        start (int): Index of the event that allocated it; -1: before the recording.
        end (int, optional): Index of the event that freed it. None: it outlived the recording.
    """

    address: int
    size: int
    category: str
    start: int
    end: int | None = None


@dataclass(frozen=True)
class Event:
    """One entry of the stream: an allocation (size > 0), a release (size < 0) or a note (size 0)."""

    address: int
    size: int
    category: str


def read_events(profile: Any) -> list[Event]:
    """Read allocations, releases and notes, in the order in which they happened.

    Args:
        profile (torch.profiler.profile): Ended, made with ``profile_memory=True``.

    Returns:
        list[Event]: The events of all threads.
    """
    timed = sorted(_walk(profiled_events(profile)), key=lambda item: item[0])
    return [event for _, event in timed]


def _walk(roots: Iterable[Any]) -> Iterator[tuple[int, Event]]:
    # By hand: the tree is deeper than Python's stack likes.
    stack = [(event, OTHER) for event in roots]
    while stack:
        event, category = stack.pop()
        if event.tag.name == 'Allocation':
            fields = event.extra_fields
            yield event.start_time_ns, Event(fields.ptr, fields.alloc_size, category)
            continue
        if event.name == NOTE:
            yield event.start_time_ns, Event(0, 0, NOTE)
            continue
        inner = _category(event.name) or category
        stack += [(child, inner) for child in event.children]


def _category(name: str) -> str | None:
    return next((category for prefix, category in _REGIONS if name.startswith(prefix)), None)


Note = Mapping[int, tuple[int, str]]
"""What is known at a moment of a step: addresses of blocks to their sizes and categories."""


def trace_blocks(events: list[Event], before: Note, notes: Iterable[Note]) -> list[Block]:
    """Follow each block from its allocation to its release.

    A release that no event tells, of a thread that the profiler does not see, shows at the latest where the address is
    given out again. A block that is noted without an allocation was there before.

    Args:
        events (list[Event]): As :func:`read_events` gives them.
        before (Note): What lived before the first event.
        notes (Iterable[Note]): One per event that is a note.

    Returns:
        list[Block]: All blocks; one that is noted has the noted category.
    """
    live = {address: Block(address, size, category, -1) for address, (size, category) in before.items()}
    blocks = list(live.values())
    remaining = iter(notes)
    for index, event in enumerate(events):
        if event.category == NOTE:
            for address, (size, category) in next(remaining).items():
                if address not in live:
                    live[address] = Block(address, size, category, -1)
                    blocks.append(live[address])
                live[address].category = category
            continue
        old = live.pop(event.address, None)
        if old is not None:
            old.end = index
        if event.size > 0:
            live[event.address] = Block(event.address, event.size, event.category, index)
            blocks.append(live[event.address])
    return blocks


def timeline(blocks: Iterable[Block], length: int) -> dict[str, list[int]]:
    """Add up what is alive after each event.

    Args:
        blocks (Iterable[Block]): The blocks.
        length (int): Number of events.

    Returns:
        dict[str, list[int]]: Category to bytes, one value per event.
    """
    changes: dict[str, list[int]] = {}
    for block in blocks:
        change = changes.setdefault(block.category, [0] * (length + 1))
        change[max(block.start, 0)] += block.size
        if block.end is not None:
            change[block.end] -= block.size
    sums = {}
    for category, change in changes.items():
        total, values = 0, []
        for step in change[:length]:
            total += step
            values.append(total)
        sums[category] = values
    return sums
