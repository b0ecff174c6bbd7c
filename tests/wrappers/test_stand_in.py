"""The batch that stands in where a rank has none left."""

import threading

import torch
from torch import nn

from mmzero.wrappers.stand_in import StandIn


def test_a_batch_that_training_changes_stands_in_as_it_was() -> None:
    stand_in, batch = StandIn(nn.Linear(1, 1)), dict(inputs=[torch.zeros(2)])
    stand_in.keep(batch)
    batch['inputs'][0] += 1
    for _ in range(2):
        with stand_in.used() as copied:
            assert stand_in.is_used and torch.equal(copied['inputs'].pop(), torch.zeros(2))
    assert not stand_in.is_used


def test_what_cannot_be_copied_is_used_again() -> None:
    stand_in, batch = StandIn(nn.Linear(1, 1)), dict(lock=threading.Lock())
    stand_in.keep(batch)
    with stand_in.used() as copied:
        assert copied is batch


def test_statistics_that_ranks_compute_together_stay() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.SyncBatchNorm(2))
    with StandIn(model).kept_statistics():
        for norm in model:
            norm.running_mean += 1
    assert [float(norm.running_mean[0]) for norm in model] == [0, 1]
