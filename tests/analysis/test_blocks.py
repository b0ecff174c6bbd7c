"""Blocks of memory are followed from events and notes."""

from mmzero.analysis.blocks import NOTE, OTHER, Event, Note, timeline, trace_blocks


def alloc(address: int, size: int, category: str = OTHER) -> Event:
    return Event(address, size, category)


def free(address: int) -> Event:
    return Event(address, -1, OTHER)


NOTED = Event(0, 0, NOTE)


def series(events: list[Event], notes: list[Note] = [], before: dict | None = None) -> dict[str, list[int]]:  # noqa: B006
    return timeline(trace_blocks(events, before or {}, notes), len(events))


def test_what_was_there_before_is_there_from_the_start_until_it_is_freed() -> None:
    found = series([alloc(2, 10), free(1), free(2)], before={1: (7, 'parameters')})
    assert found == {'parameters': [7, 0, 0], OTHER: [10, 10, 0]}


def test_a_note_names_a_block_for_its_whole_life() -> None:
    found = series([alloc(1, 4), alloc(2, 5), NOTED, free(1)], [{1: (4, 'gradients')}])
    assert found == {'gradients': [4, 4, 4, 0], OTHER: [0, 5, 5, 5]}


def test_a_note_does_not_name_what_had_the_address_before() -> None:
    found = series([alloc(1, 4), free(1), alloc(1, 8), NOTED], [{1: (8, 'gradients')}])
    assert found == {OTHER: [4, 0, 0, 0], 'gradients': [0, 0, 8, 8]}


def test_a_release_that_no_event_tells_shows_when_the_address_is_given_out_again() -> None:
    assert series([alloc(1, 4), alloc(2, 1), alloc(1, 8)]) == {OTHER: [4, 5, 9]}


def test_what_is_noted_and_was_never_allocated_was_there_before() -> None:
    assert series([alloc(1, 4), NOTED], [{2: (6, 'gradients')}]) == {OTHER: [4, 4], 'gradients': [6, 6]}
