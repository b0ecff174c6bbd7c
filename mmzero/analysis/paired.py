"""Timing contestants against each other on a machine that does other things, too.

[Note: paired timing]
A machine's speed drifts by more than the differences that are asked for, so a time says little by itself. In each
round every contestant takes one step, in an order drawn anew; a ratio is taken between two steps of one round, a moment
apart, in which the drift cancels. The median over rounds passes over steps that something interrupted. Its interval is
the percentile bootstrap's: rounds are drawn with replacement, since steps of one round belong together while rounds are
taken for independent. A step lasts from a barrier until its slowest rank is done.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class MedianRatio:
    """A median with its confidence interval.

    Args:
        median (float): The median of the sample.
        low (float): Lower end of the interval.
        high (float): Upper end.
        pairs (int): Size of the sample.
    """

    median: float
    low: float
    high: float
    pairs: int


def median_ratio(
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> MedianRatio:
    """Estimate the median of paired ratios.

    Args:
        ours (Sequence[float]): Times, round by round.
        theirs (Sequence[float]): Times of the same rounds.
        confidence (float): Of the interval. Defaults to 0.95.
        resamples (int): Bootstrap samples. Defaults to 10000.
        seed (int): Of the bootstrap. Defaults to 0.

    Returns:
        MedianRatio: Of ours / theirs.

    Raises:
        ValueError: If there are no pairs, or the numbers of times differ.
    """
    if len(ours) != len(theirs) or not len(ours):
        raise ValueError(f'expected as many times of both and at least one; got {len(ours)} and {len(theirs)}')
    ratios = np.asarray(ours, dtype=float) / np.asarray(theirs, dtype=float)
    draws = np.random.default_rng(seed).integers(len(ratios), size=(resamples, len(ratios)))
    medians = np.median(ratios[draws], axis=1)
    low, high = np.quantile(medians, [(1 - confidence) / 2, (1 + confidence) / 2])
    return MedianRatio(float(np.median(ratios)), float(low), float(high), len(ratios))


def orders(names: Sequence[str], rounds: int, seed: int) -> list[list[str]]:
    """Draw the order of each round, the same on every rank.

    Args:
        names (Sequence[str]): The contestants.
        rounds (int): Number of rounds.
        seed (int): Of the draw.

    Returns:
        list[list[str]]: Permutations of the names.
    """
    generator = np.random.default_rng(seed)
    return [[names[i] for i in generator.permutation(len(names))] for _ in range(rounds)]


def timed_rounds(
    steps: dict[str, Callable[[int], None]], rounds: int, device: torch.device, seed: int = 0
) -> dict[str, list[float]]:
    """Let contestants take turns. Collective.

    Args:
        steps (dict[str, Callable[[int], None]]): One step of each, given the round's number.
        rounds (int): Number of rounds.
        device (torch.device): Where they compute.
        seed (int): Of the orders. Defaults to 0.

    Returns:
        dict[str, list[float]]: Seconds of the slowest rank, round by round.
    """
    names = list(steps)
    seconds = torch.zeros(len(names), rounds, dtype=torch.float64)
    for number, order in enumerate(orders(names, rounds, seed)):
        for name in order:
            seconds[names.index(name), number] = _seconds(lambda: steps[name](number), device)  # noqa: B023
    slowest = largest_over_ranks(seconds, device)
    return dict(zip(names, slowest.tolist(), strict=True))


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    _wait_for(device)
    dist.barrier()
    start = time.perf_counter()
    step()
    _wait_for(device)
    return time.perf_counter() - start


def _wait_for(device: torch.device) -> None:
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def largest_over_ranks(values: Tensor, device: torch.device) -> Tensor:
    """Take the largest of each value over all ranks. Collective.

    Args:
        values (Tensor): This rank's values; a NaN of one rank may be lost.
        device (torch.device): Where the ranks meet.

    Returns:
        Tensor: The largest ones, on the CPU.
    """
    values = values.to(device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values.cpu()
