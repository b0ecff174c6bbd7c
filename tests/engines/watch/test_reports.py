"""Slow ranks are told from ranks that will never come."""

from dataclasses import replace
from typing import Any

from mmzero.engines.watch.reports import ENDED, Report, parted

A, B, C = 'the forward of the unit a (A)', 'the forward of the unit b (B)', 'the backward of the unit b (B)'


def report(rank: int, last: list[str], waiting: float = 10, doing: str = 'in train_step 3', **fields: Any) -> Report:
    values = dict(count=len(last), stack=f'stack {rank}', host='host', pid=100 + rank)
    return Report(rank=rank, last=last, doing=doing, waiting=waiting, **{**values, **fields})


def test_another_place_at_the_same_point() -> None:
    fault = parted([report(0, [A, B]), report(1, [A, C])], 10)
    assert fault is not None
    assert f'rank 0 has come to {B}' in fault and f'rank 1 has come to {C}' in fault
    assert 'stack 0' in fault and 'stack 1' in fault


def test_another_place_before_the_last() -> None:
    """Equal sizes let ranks go on for a while after they have parted."""
    fault = parted([report(0, [A, B, A]), report(1, [A, C, B])], 10)
    assert fault is not None and f'rank 0 has come to {B}; now {A}' in fault


def test_a_rank_that_does_not_wait_is_slow() -> None:
    assert parted([report(0, [A, B]), report(1, [A], waiting=0)], 10) is None


def test_a_rank_that_waits_for_a_slow_one_is_behind() -> None:
    """As with HSDP: 1 waits for 2, and 0 for both."""
    assert parted([report(0, [A, B]), report(1, [A]), report(2, [A], waiting=0)], 10) is None


def test_parted_while_a_third_is_slow() -> None:
    assert parted([report(0, [A, B]), report(1, [A, C]), report(2, [A], waiting=0)], 10) is not None


def test_all_wait_and_one_is_behind() -> None:
    fault = parted([report(0, [A, B]), report(1, [A], doing='after val_step 2')], 10)
    assert fault is not None and f'rank 1 was last at {A}, after val_step 2' in fault


def test_all_wait_at_the_same_place() -> None:
    assert parted([report(0, [A, B]), report(1, [A, B])], 10) is None


def test_evaluation_may_have_other_numbers_of_steps() -> None:
    """Ranks with fewer batches go on together; what they send then may take long."""
    assert parted([report(0, [A], doing='after val_step 3'), report(1, [A], doing='after val_step 2')], 10) is None
    assert parted([report(0, [A, B], doing='after val_step 3'), report(1, [A], doing='after val_step 2')], 10) is None
    assert parted([report(0, [A, B], doing='in val_step 3'), report(1, [A], doing='after val_step 2')], 10) is not None
    assert parted([report(0, [], doing='in train_step 3'), report(1, [], doing='in val_step 3')], 10) is not None


def test_the_limit_counts_on_both_sides() -> None:
    assert parted([report(0, [A, B]), report(1, [A, C], waiting=9)], 10) is None


def test_places_that_are_not_kept_any_more() -> None:
    assert parted([report(0, [B], count=600), report(1, [A, B, A], count=600)], 10) is not None
    assert parted([report(0, [A], count=600), report(1, [A, B, A], count=600)], 10) is None


def test_a_rank_that_is_gone() -> None:
    fault = parted([report(0, [A, B]), report(1, [A], waiting=0, gone=True)], 10)
    assert (
        fault is not None
        and 'rank 1 has ended (process 101 on host is gone): it was last at' in fault
        and 'was killed' in fault
    )
    assert parted([report(0, [A, B], waiting=0), report(1, [A], waiting=0, gone=True)], 10) is None


def test_a_rank_that_has_left_its_loop() -> None:
    fault = parted([report(0, [A, B]), report(1, [A], 0, f'{ENDED}, after val_step 2', gone=True)], 10)
    assert fault is not None and 'left without an error, after val_step 2' in fault and 'model.join(loader' in fault


def test_text() -> None:
    one = replace(report(0, [A, 'ü']), gone=True)
    assert Report.read(one.text()) == one
