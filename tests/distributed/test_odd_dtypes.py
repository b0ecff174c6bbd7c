"""Weights of dtypes that gloo does not send, gathered into a full file and loaded from it, bit by bit."""

from typing import Any

import pytest
import torch
from torch import nn

from mmzero import ZeroModelWrapper
from tests.distributed.cases import Faults, differing, merged
from tests.distributed.detector import Detector, detector_runner
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed

STAGES = (0, 3)
DTYPES = ('float8_e4m3fn', 'int16')
UNITS = dict(type='ModuleClassPolicy', classes=['Backbone'])


def bits(dtype: str, seed: int) -> torch.Tensor:
    """All bits, also those that are no number."""
    kind = getattr(torch, dtype)
    values = torch.randint(0, 256, (7, 4, kind.itemsize), generator=torch.Generator().manual_seed(seed))
    return values.to(torch.uint8).view(kind).reshape(7, 4)


class WithBuffer(Detector):
    """Of rows that two ranks do not share alike."""

    def __init__(self, dtype: str, **more: Any) -> None:
        super().__init__(**more)
        self.register_buffer('packed', bits(dtype, 0))


class WithParameter(Detector):
    """MMEngine's ``init_weights`` takes the mean of parameters, which these dtypes do not have."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.backbone.packed = nn.Parameter(bits(dtype, 0), requires_grad=False)


def parameter(folder: str, dtype: str, stage: int) -> list[str]:
    model = ZeroModelWrapper(module=WithParameter(dtype), stage=stage, find_unused_parameters=True, wrap_policy=UNITS)
    state = model.engine.model_state()
    other = bits(dtype, 1)
    faults = differing({'packed': state['backbone.packed']}, {'packed': bits(dtype, 0)}) if state else []
    model.engine.load_model_state({'backbone.packed': other})
    state = model.engine.model_state()
    return faults + (differing({'packed': state['backbone.packed']}, {'packed': other}) if state else [])


def buffer(folder: str, dtype: str, stage: int) -> list[str]:
    """Through a whole run, its file, and loading that before and after sharding."""
    own = f'{folder}/{dtype} {stage}'
    path = f'{own}/work/epoch_1.pth'
    detector_runner(own, stage, dict(type=WithBuffer, dtype=dtype)).train()
    saved = torch.load(path, weights_only=True)['state_dict']
    faults = differing({'packed': saved['packed']}, {'packed': bits(dtype, 0)})
    for later in (False, True):
        runner = detector_runner(
            own, stage, dict(type=WithBuffer, dtype=dtype), **({} if later else dict(load_from=path))
        )
        runner.prepare()
        if later:
            runner.model.module.packed.copy_(bits(dtype, 2))
            runner.load_checkpoint(path, strict=True)
        faults += differing({'packed': runner.model.module.packed}, {'packed': bits(dtype, 0)})
    return faults


def run_cases(folder: str) -> Faults:
    return {
        f'{case.__name__} {dtype} {stage}': case(folder, dtype, stage)
        for case in (parameter, buffer)
        for dtype in DTYPES
        for stage in STAGES
    }


@pytest.fixture(scope='module')
def found(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return merged(run_ranks(2, run_cases, str(tmp_path_factory.mktemp('dtypes'))))


@pytest.mark.parametrize('stage', STAGES)
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('case', ['parameter', 'buffer'])
def test_odd_dtypes(found: Faults, case: str, dtype: str, stage: int) -> None:
    name = f'{case} {dtype} {stage}'
    assert not found[name], '\n'.join(found[name])
