"""Hooks of models that rename and resize weights run at every stage, before and after sharding, in both formats."""

import io
import logging
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.logging import MMLogger
from torch import nn

from mmzero.errors import CheckpointError
from tests.distributed.cases import Faults, differing, merged, refused
from tests.distributed.detector import Detector, detector_runner, on_file, pretrained, seeded, whole_state
from tests.distributed.ranks import run_ranks
from tests.distributed.resizing import loaded_by_mmengine, resizes_alike

pytestmark = pytest.mark.distributed

STAGES = (0, 2, 3)


class Positions(Detector):
    """Resizes a table in a hook, and reads files of its older version."""

    def __init__(self, length: int = 4, **more: Any) -> None:
        super().__init__(**more)
        self.position = nn.Parameter(torch.randn(1, length, 12))
        self.register_buffer('index', torch.arange(length))
        self._register_load_state_dict_pre_hook(self._resize)

    def _resize(self, state: dict, prefix: str, *args: Any) -> None:
        name = f'{prefix}position'
        if name in state and state[name].shape != self.position.shape:
            state[name] = nn.functional.interpolate(state[name].mT, self.position.shape[1]).mT
            del state[f'{prefix}index']

    def _load_from_state_dict(self, state: dict, prefix: str, *args: Any) -> None:
        for name in [name for name in state if name.startswith(f'{prefix}neck.')]:
            state[name.replace('neck.', 'backbone.', 1)] = state.pop(name)
        super()._load_from_state_dict(state, prefix, *args)


def resized(folder: str, stage: int) -> list[str]:
    """Before and after sharding."""
    return resizes_alike(folder, stage, dict(type=Positions), dict(type=Positions, length=9))


def resized_from_shards(folder: str, stage: int) -> list[str]:
    """A folder of shards with a table of another length and another head."""
    own = f'{folder}/shards {stage}'
    source = sharded_runner(f'{own}/source', stage, dict(type=Positions, length=9, classes=8))
    source.train()
    state = whole_state(source.model.module)
    path = f'{own}/source/work/epoch_1'
    wanted = loaded_by_mmengine(dict(type=Positions), state)
    target = sharded_runner(f'{own}/target', stage, dict(type=Positions))
    target.prepare()
    with told() as text:
        target.load_checkpoint(path)
    found = {name: value for name, value in whole_state(target.model.module).items() if name in wanted}
    faults = differing(found, wanted)
    faults += [] if 'position' in wanted else ['it was not resized']
    shapes = ('head.weight', '[8, 12]', '[7, 12]', 'head.bias', '[8]', '[7]')
    if dist.get_rank() == 0:
        faults += [f'{part} is not in {text.getvalue()}' for part in shapes if part not in text.getvalue()]
    with refused(faults, CheckpointError, path, *shapes):
        target.load_checkpoint(path, strict=True)
    return faults


def sharded_runner(folder: str, stage: int, model: dict) -> Any:
    cfg = dict(
        model_wrapper_cfg=dict(type='ZeroModelWrapper', stage=stage, find_unused_parameters=True),
        checkpoint=dict(format='sharded'),
    )
    return detector_runner(folder, stage, model, cfg=cfg)


@contextmanager
def told() -> Any:
    """What is logged."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = MMLogger.get_current_instance()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield stream
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def shapes_at_once(folder: str, stage: int) -> list[str]:
    """Every shape that differs in one error, or in one warning, before and after sharding."""
    state = seeded(lambda: Detector(classes=9), 3).state_dict()
    state['backbone.conv.bias'] = torch.rand(5)
    state['left'] = torch.rand(1)
    del state['backbone.norm.bias']
    path = on_file(f'{folder}/shapes {stage}.pth', state)
    pairs = [('head.weight', '[9, 12]', '[7, 12]'), ('head.bias', '[9]', '[7]'), ('backbone.conv.bias', '[5]', '[12]')]
    parts = [*(part for pair in pairs for part in pair), 'backbone.norm.bias', 'left']
    faults: list[str] = []
    for before in (True, False):
        runner = detector_runner(f'{folder}/shapes {stage}', stage)
        if not before:
            runner.prepare()
        with told() as text:
            runner.load_checkpoint(path)
        if dist.get_rank() == 0:
            faults += [f'{part} is not told: {text.getvalue()}' for part in parts if part not in text.getvalue()]
        with refused(faults, CheckpointError, path, *parts):
            runner.load_checkpoint(path, strict=True)
    return faults


def failing_hooks(folder: str, stage: int) -> list[str]:
    """An error of the model's own hook ends all ranks, with the file."""
    state = seeded(lambda: Positions(9), 3).state_dict()
    del state['index']
    path = on_file(f'{folder}/failing {stage}.pth', state)
    faults: list[str] = []
    runner = detector_runner(f'{folder}/failing {stage}', stage, dict(type=Positions))
    runner.prepare()
    with refused(faults, CheckpointError, path, "KeyError: 'index'"):
        runner.load_checkpoint(path)
    with refused(faults, CheckpointError, path, "KeyError: 'index'"):
        detector_runner(f'{folder}/failing {stage}', stage, dict(type=Positions), load_from=path).prepare()
    return faults


def only_by_hooks(folder: str, stage: int) -> list[str]:
    """A file of which nothing fits before the hooks have renamed it."""
    own = seeded(Positions, 3).state_dict()
    state = {name.replace('backbone.', 'neck.'): value for name, value in own.items() if 'backbone.' in name}
    path = on_file(f'{folder}/renamed {stage}.pth', state)
    wanted = {name: value for name, value in own.items() if 'backbone.' in name}
    faults = []
    for way in ('load_from', 'init_cfg', 'later'):
        model = dict(type=Positions, **(dict(init_cfg=pretrained(path)) if way == 'init_cfg' else {}))
        fields = dict(load_from=path) if way == 'load_from' else {}
        runner = detector_runner(f'{folder}/renamed {stage}', stage, model, **fields)
        runner.prepare()
        if way == 'later':
            runner.load_checkpoint(path)
        found = {name: value for name, value in whole_state(runner.model.module).items() if name in wanted}
        faults += [f'{way}: {text}' for text in differing(found, wanted)]
    return faults


CASES: tuple[Callable[[str, int], list[str]], ...] = (
    resized,
    resized_from_shards,
    shapes_at_once,
    failing_hooks,
    only_by_hooks,
)


def run_cases(folder: str) -> Faults:
    return {f'{case.__name__} {stage}': case(folder, stage) for case in CASES for stage in STAGES}


@pytest.fixture(scope='module')
def found(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return merged(run_ranks(2, run_cases, str(tmp_path_factory.mktemp('resized'))))


@pytest.mark.parametrize('stage', STAGES)
@pytest.mark.parametrize('case', [case.__name__ for case in CASES])
def test_resized_weights(found: Faults, case: str, stage: int) -> None:
    assert not found[f'{case} {stage}'], '\n'.join(found[f'{case} {stage}'])
