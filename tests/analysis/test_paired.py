"""The statistics, on samples whose truth is known, and whose turn it is."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mmzero.analysis.paired import largest_over_ranks, median_ratio, orders, timed_rounds
from mmzero.engines import init_process_group
from tests.distributed.ranks import run_ranks


def times(pairs: int, ratio: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Times of two contestants: a machine that drifts by a factor of 20, 5% noise, one round in ten interrupted."""
    rng = np.random.default_rng(seed)
    drift = np.exp(np.cumsum(rng.normal(0, 0.3, pairs)))
    ours, theirs = drift * rng.lognormal(np.log(ratio), 0.05, pairs), drift * rng.lognormal(0, 0.05, pairs)
    ours[rng.random(pairs) < 0.05] *= 10
    theirs[rng.random(pairs) < 0.05] *= 10
    return ours, theirs


def test_equal_ratios_leave_no_interval() -> None:
    found = median_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (found.median, found.low, found.high, found.pairs) == (2.0, 2.0, 2.0, 3)


def test_drift_and_interruptions_cancel() -> None:
    ours, theirs = times(60, 1.03, seed=1)
    found = median_ratio(ours, theirs)
    assert found.median == pytest.approx(1.03, abs=0.03)
    assert found.high - found.low < 0.08
    # Without pairs they would not.
    shuffled = median_ratio(ours, np.random.default_rng(2).permutation(theirs))
    assert shuffled.high - shuffled.low > 0.3


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    covered = {0.95: 0, 0.5: 0}
    for seed in range(300):
        for confidence in covered:
            found = median_ratio(*times(40, 1.1, seed), confidence=confidence, resamples=500)
            covered[confidence] += found.low <= 1.1 <= found.high
    # Three standard errors of 300 trials are 0.04 and 0.09.
    assert covered[0.95] / 300 == pytest.approx(0.95, abs=0.04)
    assert covered[0.5] / 300 == pytest.approx(0.5, abs=0.09)


def test_the_interval_narrows_with_the_root_of_the_pairs() -> None:
    few, many = (median_ratio(*times(pairs, 1.0, seed=3)) for pairs in (50, 5000))
    assert (few.high - few.low) / (many.high - many.low) == pytest.approx(10, rel=0.5)


def test_the_bootstrap_is_seeded() -> None:
    sample = times(30, 1.0, seed=0)
    assert median_ratio(*sample, seed=1) == median_ratio(*sample, seed=1)
    assert median_ratio(*sample, seed=1, resamples=50) != median_ratio(*sample, seed=2, resamples=50)


@pytest.mark.parametrize('ours, theirs', [([], []), ([1.0, 2.0], [1.0])])
def test_samples_without_pairs_are_refused(ours: list, theirs: list) -> None:
    with pytest.raises(ValueError, match=f'got {len(ours)} and {len(theirs)}'):
        median_ratio(ours, theirs)


def test_every_contestant_is_in_every_place() -> None:
    drawn = orders(['a', 'b', 'c'], 300, seed=0)
    assert drawn == orders(['a', 'b', 'c'], 300, seed=0) != orders(['a', 'b', 'c'], 300, seed=1)
    assert all(sorted(order) == ['a', 'b', 'c'] for order in drawn)
    for name in 'abc':
        for place in range(3):
            assert sum(order[place] == name for order in drawn) == pytest.approx(100, abs=30)


def test_contestants_take_turns_round_by_round(group: None) -> None:
    init_process_group()
    taken: list[tuple[int, str]] = []
    steps = {name: lambda number, name=name: taken.append((number, name)) for name in 'abc'}
    found = timed_rounds(steps, 4, torch.device('cpu'), seed=5)
    expected = [(number, name) for number, order in enumerate(orders('abc', 4, seed=5)) for name in order]
    assert taken == expected
    assert list(found) == list('abc')
    assert all(len(seconds) == 4 and min(seconds) > 0 for seconds in found.values())


def one_of_each() -> list[float]:
    values = torch.tensor([1.0, 5.0]) if dist.get_rank() == 0 else torch.tensor([3.0, 2.0])
    return largest_over_ranks(values, torch.device('cpu')).tolist()


@pytest.mark.distributed
def test_the_slowest_rank_counts() -> None:
    for found in run_ranks(2, one_of_each):
        assert found == [3.0, 5.0]
