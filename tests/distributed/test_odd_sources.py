"""Weights whose files, names or layouts are others than the model's come in as a plain model loads them."""

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from mmengine.hooks import EMAHook
from safetensors.torch import save_file
from torch import nn

from mmzero.errors import CheckpointError
from tests.distributed.cases import Faults, differing, merged, refused
from tests.distributed.detector import Detector, detector_runner, on_file, seeded, tensors_of, whole_state
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed


class LaidOut(Detector):
    """Has weights that are not laid out row by row; the sharded ones in a unit, the 16-bit one whole."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.conv = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(6, 12).t())
        self.low = nn.Parameter(torch.randn(6, 12).to(torch.bfloat16).t())


class Tied(Detector):
    """Has a weight of two names."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # First in the alphabet, last in the state dict.
        self.again = nn.Linear(12, 12, bias=False)
        self.again.weight = self.backbone.conv.weight


def saved(path: str, state: dict[str, torch.Tensor]) -> str:
    """Write a file on rank 0."""
    if dist.get_rank() == 0:
        save_file({name: value.clone().contiguous() for name, value in state.items()}, path)
    dist.barrier()
    return path


def loaded(folder: str, stage: int, model: dict | None = None, **changes: Any) -> dict[str, torch.Tensor]:
    runner = detector_runner(folder, stage, model, **changes)
    runner.prepare()
    runner.load_or_resume()
    return whole_state(runner.model.module)


def layouts(folder: str, stage: int) -> list[str]:
    """Ranks without weights of their own start with rank 0's, however these lie in memory."""
    runner = detector_runner(folder, stage, dict(type=LaidOut))
    own = {name: value.clone() for name, value in runner.model.state_dict().items()}
    path = on_file(f'{folder}/own.pth', own)
    runner.prepare()
    own = torch.load(path)
    found = tensors_of(runner.model.module)
    names = ('conv.weight', 'turned', 'low')
    return differing({name: found[name] for name in names}, {name: own[name] for name in names})


def tied(folder: str, stage: int) -> list[str]:
    """Of values that differ the last stay, as when torch loads them."""
    model = seeded(Tied, 0)
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    path = saved(f'{folder}/tied.safetensors', state)
    return differing(loaded(folder, stage, dict(type=Tied), load_from=path), model.state_dict())


def in_home(folder: str, stage: int) -> list[str]:
    """``~`` is what it is for MMEngine, in every form."""
    state, faults = seeded(Detector, 9).state_dict(), []
    saved(f'{folder}/own.safetensors', state)
    on_file(f'{folder}/own.pth', state)
    Path(folder, 'parts').mkdir(exist_ok=True)
    on_file(f'{folder}/parts/pytorch_model.bin', state)
    with patch.dict(os.environ, HOME=folder):
        for name in ('own.safetensors', 'own.pth', 'parts'):
            faults += [f'{name}: {text}' for text in differing(loaded(folder, stage, load_from=f'~/{name}'), state)]
    return faults


def from_url(folder: str, stage: int) -> list[str]:
    """No library reads such weights from elsewhere."""
    faults: list[str] = []
    path = 'http://localhost/own.safetensors'
    with refused(faults, CheckpointError, path, 'download them first'):
        loaded(folder, stage, load_from=path)
    return faults


def averages(folder: str, stage: int) -> list[str]:
    """An average starts as a copy of what was loaded, of files with other names, with more, or with another head."""
    state, faults = seeded(Detector, 9).state_dict(), []
    files = {
        'named': {f'module.{name}': value for name, value in state.items()},
        'more': {**state, 'more': torch.ones(3)},
    }
    for name, content in files.items():
        path = saved(f'{folder}/{name}.safetensors', content)
        found = started_average(f'{folder}/{name}', stage, path)
        faults += [f'{name}: {text}' for text in differing(found, state)]
    cfg = dict(model_wrapper_cfg=dict(type='ZeroModelWrapper', stage=stage), checkpoint=dict(format='sharded'))
    runner = detector_runner(f'{folder}/nine', stage, dict(classes=9), cfg=cfg)
    runner.train()
    state = whole_state(runner.model.module)
    found = started_average(f'{folder}/seven', stage, f'{folder}/nine/work/epoch_1')
    parts = [name for name in state if name.startswith('backbone.')]
    return faults + differing({name: found[name] for name in parts}, {name: state[name] for name in parts})


def started_average(folder: str, stage: int, path: str) -> dict[str, torch.Tensor]:
    """What a val of averaged weights would see, on every rank."""
    runner = detector_runner(folder, stage, load_from=path, custom_hooks=[dict(type='EMAHook', strict_load=True)])
    runner.val()
    hook: Any = next(hook for hook in runner.hooks if isinstance(hook, EMAHook))
    box = [hook.parts.gather(hook.ema_model.module.state_dict())]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def in_part(folder: str, stage: int) -> list[str]:
    """Where another node sees not all files, rank 0 reads."""
    state = seeded(Detector, 9).state_dict()
    disk = Path(folder, f'disk {dist.get_rank()}')
    disk.mkdir()
    names = {name: f'{"head" if name.startswith("head") else "rest"}.safetensors' for name in state}
    for file in {'rest.safetensors'} if dist.get_rank() else set(names.values()):
        save_file({name: value for name, value in state.items() if names[name] == file}, disk / file)
    (disk / 'model.safetensors.index.json').write_text(json.dumps(dict(weight_map=names)))
    dist.barrier()
    before = os.getcwd()
    os.chdir(disk)
    try:
        # The same path on every rank, and another folder.
        return differing(loaded(folder, stage, load_from='/proc/self/cwd'), state)
    finally:
        os.chdir(before)


CASES = (layouts, tied, in_home, from_url, averages, in_part)


def run_cases(folder: str) -> Faults:
    found: Faults = {}
    for case in CASES:
        for stage in (0, 3) if case is layouts else (3,):
            own = f'{folder}/{case.__name__} {stage}'
            os.makedirs(own, exist_ok=True)
            found[f'{case.__name__} {stage}'] = case(own, stage)
    return found


@pytest.fixture(scope='module')
def found(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return merged(run_ranks(2, run_cases, str(tmp_path_factory.mktemp('sources'))))


@pytest.mark.parametrize('case', ['layouts 0', *(f'{case.__name__} 3' for case in CASES)])
def test_odd_sources(found: Faults, case: str) -> None:
    assert not found[case], '\n'.join(found[case])
