"""The parity suite's comparison sees what is wrong."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed.training import compare


def record() -> dict[str, Any]:
    """A run of two steps of one weight, whose last element has noise for a gradient."""
    return dict(
        losses=[2.0, 1.0],
        norms=[1.0, 1.0],
        grads={'w': torch.tensor([1.0, 1.0, 1e-9])},
        before={'w': torch.zeros(3), 'frozen': torch.ones(1)},
        after={'w': torch.tensor([0.01, 0.01, 0.01]), 'frozen': torch.ones(1)},
        buffers={'mean': torch.ones(2)},
    )


def test_equal_runs_have_no_distance() -> None:
    assert set(compare(record(), record()).values()) == {0.0}


@pytest.mark.parametrize(
    'break_it',
    [
        lambda run: run['losses'].__setitem__(-1, float('nan')),
        lambda run: run['norms'].__setitem__(-1, float('inf')),
        lambda run: run['after']['w'].__setitem__(0, float('nan')),
        lambda run: run['after']['w'].__setitem__(2, 1e6),
        lambda run: run['after']['frozen'].add_(1e-3),
        lambda run: run['buffers']['mean'].add_(1),
        lambda run: run['grads'].__setitem__('w', None),
    ],
)
def test_what_no_distance_shows_is_an_error(break_it: Callable[[dict], None]) -> None:
    run = copy.deepcopy(record())
    break_it(run)
    with pytest.raises(AssertionError):
        compare(run, record())
