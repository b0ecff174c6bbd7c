"""Distances between trainings, and what of them is out of bounds."""

import copy
import math

import pytest
import torch

from mmzero.analysis.sweep.comparison import BOUNDS, ROOM, beyond, distances, largest
from mmzero.analysis.sweep.training import Record


def record() -> Record:
    """Two steps of a model of three parameters, one of them without a gradient."""
    before = dict(a=torch.ones(4, 4), b=torch.ones(4), idle=torch.ones(2))
    after = dict(a=torch.full((4, 4), 0.5), b=torch.full((4,), 0.9), idle=torch.ones(2))
    grads = dict(a=torch.ones(4, 4), b=torch.full((4,), 0.1), idle=None)
    buffers = dict(mean=torch.ones(3), count=torch.tensor(2))
    return Record([2.0, 1.0], [3.0, 4.0], grads, before, after, buffers)


def test_equal_trainings_are_not_apart() -> None:
    assert distances(record(), record()) == dict.fromkeys(BOUNDS, 0.0)


def changed(what: str) -> Record:
    """By 1e-3 of the value in one place."""
    other = copy.deepcopy(record())
    if what == 'loss':
        other.losses[1] *= 1.001
    elif what == 'norm':
        other.norms[0] *= 1.001
    else:
        tensors = dict(grad=other.grads, tensor=other.after, buffer=other.buffers)[what]
        name = dict(grad='b', tensor='b', buffer='mean')[what]
        tensors[name] = tensors[name] * 1.001
    return other


@pytest.mark.parametrize('what', ['loss', 'norm', 'grad', 'tensor', 'buffer'])
def test_each_quantity_is_seen(what: str) -> None:
    apart = distances(changed(what), record())
    assert what in beyond(apart, {})
    # Weights of one tensor are weights of the model, and the changed norm is that of the first step.
    assert set(beyond(apart, {})) - {'update', 'first'} == {what}
    assert ('first' in beyond(apart, {})) == (what == 'norm')
    # Where the reference is as far from itself, it is no fault; of a part of it, it is.
    assert not beyond(apart, apart)
    assert what in beyond(apart, {name: value / (2 * ROOM) for name, value in apart.items()})


def test_small_update_of_one_tensor_is_measured_by_itself() -> None:
    apart = distances(changed('tensor'), record())
    # 0.0009 of an update of 0.1 in each element, within a model that moves by 0.5.
    assert apart['tensor'] == pytest.approx(0.009, rel=0.02)
    assert apart['update'] == pytest.approx(0.0009 * 2 / math.hypot(0.5 * 4, 0.1 * 2), rel=0.01)


def test_gradient_or_update_on_one_side_only() -> None:
    other = record()
    other.grads['idle'] = torch.zeros(2)
    with pytest.raises(ValueError, match='gradients in one of the trainings only: idle'):
        distances(other, record())
    other = record()
    other.after['idle'] = torch.zeros(2)
    with pytest.raises(ValueError, match='moved without a gradient: idle'):
        distances(other, record())


def test_numbers_that_are_none_are_never_passed() -> None:
    other = record()
    other.losses[0] = math.nan
    with pytest.raises(ValueError, match=r'the training has losses \[nan'):
        distances(other, record())
    with pytest.raises(ValueError, match='the reference has losses'):
        distances(record(), other)
    other = record()
    other.after['b'][1] = math.nan
    assert beyond(distances(other, record()), {}) == ['update', 'tensor']
    assert math.isnan(largest([1.0, math.nan, 2.0])) and largest([]) == 0
    other = record()
    other.buffers['count'] = torch.tensor(3)
    assert beyond(distances(other, record()), {}) == ['buffer']
