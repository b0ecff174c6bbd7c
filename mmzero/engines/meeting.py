"""Telling ranks that wait in a collective from ranks that will never come.

[Note: meetings]
Saving gathers shards, so every rank has to take part. ``if is_main_process(): save`` leaves one rank waiting until
the group's timeout of half an hour, or worse, exchanges its tensors with those of the others' next step. So ranks meet
at the store before they gather, and leave word there of every train_step that they start, which costs one message
without an answer. All ranks of a right program start the same train_steps between two meetings: one that has started
more than the rank that waits has gone past the meeting, however slow the others are. So has one that is at the end of
a loop that the other is still in. Forwards of val and test count where ranks run them together
([Note: the end of a loop]); a bare forward, val_step or test_step does not, since a rank that holds the whole model may
do these alone.
"""

import time

import torch.distributed as dist

from mmzero._compat import default_store, group_timeout
from mmzero.engines.place import alone, here, places
from mmzero.engines.watch import TRAIL
from mmzero.errors import CheckpointError

# How long to wait before asking where the others are; ranks are rarely further apart.
PATIENCE_SECONDS = 2.0
# Between two looks at the store; doubled from a millisecond on.
LONGEST_PAUSE_SECONDS = 0.25
LONGEST_BETWEEN_LOOKS_SECONDS = 30.0


def started(what: str) -> None:
    """Leave word that this rank starts something that all ranks do together.

    Args:
        what (str): Such as 'train_step', for the error.
    """
    if alone():
        return
    here.steps += 1
    try:
        here.leave_word('goes', what)
    except RuntimeError:
        # Rank 0, which keeps the store, has ended: there is nobody to tell.
        return


def meet(what: str) -> None:
    """Wait until every rank is here. Collective.

    Args:
        what (str): What the ranks will do together, for the error.

    Raises:
        CheckpointError: If a rank has gone on without it, or is at another meeting; within seconds.
    """
    if alone():
        return
    before = TRAIL.doing
    TRAIL.note(f'waiting for all ranks to {what}')
    try:
        _meet(what)
    finally:
        TRAIL.note(before)


def _meet(what: str) -> None:
    store, number = default_store(), here.meetings + 1
    key = f'mmzero/meeting/{number}/{what}'
    here.leave_word('waits', what)
    if store.add(key, 1) == dist.get_world_size():
        store.set(f'{key}/all', '')
    fault = _wait_for_all(f'{key}/all', number, what)
    here.state = 'goes'
    if fault is not None:
        # As if this rank had not come.
        store.add(key, -1)
        raise CheckpointError(
            f'rank {dist.get_rank()} wants to {what}, but {fault}. All ranks have to do it together: do not call it on '
            'one rank alone (if is_main_process(): ...), nor on a condition that differs from rank to rank'
        )
    here.meetings = number


def _wait_for_all(key: str, number: int, what: str) -> str | None:
    """Wait for a key that the last rank sets; says why it will not be set, if that can be told."""
    start, pause, fault = time.monotonic(), 0.001, None
    timeout, next_look = group_timeout(), PATIENCE_SECONDS
    # Not Store.wait, which warns of each of its timeouts.
    while fault is None and not default_store().check([key]):
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        waited = time.monotonic() - start
        if waited > timeout.total_seconds():
            fault = f'not all ranks came within {timeout}'
        elif waited > next_look:
            # Rarer and rarer: every rank that waits asks for every other one.
            next_look = waited + min(waited, LONGEST_BETWEEN_LOOKS_SECONDS)
            fault = _elsewhere(number, what)
    return fault


def _elsewhere(number: int, what: str) -> str | None:
    """Say which rank will not come to a meeting, if one is known not to."""
    for rank, place in places(range(dist.get_world_size())).items():
        if place.meetings == number - 1 and place.state == 'waits' and place.what != what:
            return f'rank {rank} wants to {place.what}'
        has_left = place.state == 'ends' and place.loops[-1] in here.loops
        if place.meetings < number and (place.steps > here.steps or has_left):
            return f'rank {rank} has gone on to {place.what} without it'
    return None
