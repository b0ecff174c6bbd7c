"""The pair on a small model, as fixtures that give functions."""

from collections.abc import Callable

import pytest
import torch
from mmengine.registry import MODEL_WRAPPERS, OPTIM_WRAPPERS

import mmzero  # noqa: F401
from tests.models import ToyModel, toy_batch


@pytest.fixture
def wrap(group: None) -> Callable:
    """Wrap a model, its blocks being the units; the process group is destroyed after the test."""

    def wrap(net=None, stage=3, **fields):
        torch.manual_seed(0)
        # ToyModel has parameters that it does not use, on which DDP fails otherwise.
        defaults = dict(
            wrap_policy=dict(type='ModuleClassPolicy', classes=['Block']), find_unused_parameters=stage == 0
        )
        cfg = dict(type='ZeroModelWrapper', module=net or ToyModel(), stage=stage)
        return MODEL_WRAPPERS.build(cfg | defaults | fields)

    return wrap


@pytest.fixture
def optim_of() -> Callable:
    """Make the optimizer wrapper of a wrapped model."""

    def optim_of(model, **fields):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return OPTIM_WRAPPERS.build(dict(type='ZeroOptimWrapper', optimizer=optimizer, **fields))

    return optim_of


@pytest.fixture
def losses_of() -> Callable:
    """Train on one batch, always the same, and return the losses."""

    def losses_of(model, optim, steps=4):
        optim.initialize_count_status(model, 0, steps)
        return [float(model.train_step(toy_batch(0), optim)['loss']) for _ in range(steps)]

    return losses_of
