"""Random states: what was drawn once is drawn again."""

import random

import numpy as np
import pytest
import torch

from mmzero.checkpoint import plain, random_state, set_random_state, write_checkpoint


def draw():
    """Draw from every generator; odd counts of normal numbers leave one cached."""
    return dict(
        python=[random.random(), random.gauss(0, 1)],
        numpy=[*np.random.rand(3), np.random.randn()],
        torch=torch.randn(5).tolist(),
    )


@pytest.fixture(autouse=True)
def _seeded():
    """Known states, and the earlier ones afterwards."""
    before = random_state()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    draw()
    yield
    set_random_state(before)


def test_round_trip():
    state = random_state()
    expected = draw()
    draw()
    set_random_state(state)
    assert draw() == expected


def test_round_trip_through_a_file(tmp_path):
    path = str(tmp_path / 'x.pth')
    write_checkpoint(plain(random_state()), path)
    expected = draw()
    set_random_state(torch.load(path, weights_only=True))
    assert draw() == expected


def test_taking_the_state_draws_nothing():
    state = random_state()
    expected = draw()
    set_random_state(state)
    random_state()
    assert draw() == expected


def test_state_does_not_change_by_drawing():
    state = random_state()
    kept = {name: plain(value) for name, value in random_state().items()}
    draw()
    assert torch.equal(state['torch'], kept['torch'])
    assert torch.equal(state['numpy'][1], kept['numpy'][1])


def test_without_data_python_and_numpy_go_on():
    state = random_state()
    first, second = draw(), draw()
    set_random_state(state)
    draw()
    set_random_state(state, data=False)
    third = draw()
    assert third['torch'] == first['torch']
    assert (third['python'], third['numpy']) == (second['python'], second['numpy'])
