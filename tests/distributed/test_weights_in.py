"""Weights on their way into a model: whole, read once and safely, and the same on every rank at every stage."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner
from mmengine.runner.checkpoint import load_state_dict
from safetensors.torch import save_file

from mmzero import ZeroModelWrapper
from mmzero.checkpoint import read_checkpoint
from mmzero.errors import CheckpointError
from mmzero.runner import checkpoints as zero_runner_file
from tests.distributed.cases import Faults, count_opened_files, differing, merged, opened, refused
from tests.distributed.detector import (
    Detector,
    LoadsByItself,
    detector_runner,
    on_file,
    pretrained,
    seeded,
    tensors_of,
    whole_state,
)
from tests.distributed.ranks import run_ranks
from tests.models import ToyModel, toy_batch
from tests.vectors import Count, loader

pytestmark = pytest.mark.distributed

STAGES = (0, 1, 2, 3)
FIELDS = dict(wrap_policy=dict(type='ModuleClassPolicy', classes=['Block']), find_unused_parameters=True)


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.path,)


def into_shards(stage: int, folder: str) -> list[str]:
    """A whole state dict goes in through every door, also while units are gathered."""
    source = seeded(ToyModel, 9)
    state, part = source.state_dict(), source.blocks[0].state_dict()
    doors: dict[str, Callable[[ZeroModelWrapper], Any]] = {
        'wrapper': lambda model: model.load_state_dict(state),
        'wrapper, not strict': lambda model: model.load_state_dict({**state, 'more': torch.ones(1)}, strict=False),
        'wrapper, names of DDP': lambda model: model.load_state_dict({f'module.{n}': v for n, v in state.items()}),
        'model': lambda model: model.module.load_state_dict(state),
        'mmengine': lambda model: load_state_dict(model, state.copy()),
        'mmengine, strict': lambda model: load_state_dict(model.module, state.copy(), strict=True),
    }
    faults = []
    for name, load in doors.items():
        model = ZeroModelWrapper(module=seeded(ToyModel, dist.get_rank()), stage=stage, **FIELDS)
        with torch.no_grad():
            model(**toy_batch(0))
        load(model)
        faults += [f'{name}: {text}' for text in differing(whole_state(model.module), state)]
    model = ZeroModelWrapper(module=seeded(ToyModel, 5), stage=stage, **FIELDS)
    model.module.blocks[0].load_state_dict(part)
    faults += [f'block: {text}' for text in differing(whole_state(model.module.blocks[0]), part)]
    # Its own part, as state_dict gives it.
    model.load_state_dict(seeded(lambda: model, 0).state_dict())
    return faults


def nothing_fits(stage: int, folder: str) -> list[str]:
    """What would load nothing is refused on every rank: strict or not, before and after sharding, in init_cfg."""
    faults: list[str] = []
    source = seeded(Detector, 0).state_dict()
    states = {
        'prefix': {f'student.{name}': value for name, value in source.items()},
        'sizes': {name: torch.ones(*value.shape, 2) for name, value in source.items()},
        'empty': {},
    }
    sharded = detector_runner(folder, stage)
    sharded.prepare()
    for name, state in states.items():
        path = on_file(f'{folder}/nothing {stage} {name}.pth', dict(state_dict=state))
        for strict in (False, True):
            with refused(faults, CheckpointError, 'load_state_dict: no'):
                sharded.model.load_state_dict(state, strict=strict)
            with refused(faults, CheckpointError, path):
                sharded.load_checkpoint(path, strict=strict)
        with refused(faults, CheckpointError, path):
            detector_runner(folder, stage, load_from=path).prepare()
        parts = dict(init_cfg=pretrained(path)), dict(backbone_cfg=pretrained(path, prefix='backbone'))
        for part in parts:
            with refused(faults, CheckpointError, path):
                detector_runner(folder, stage, part).prepare()
    # The file of a whole model, for the backbone alone.
    path = on_file(f'{folder}/whole {stage}.pth', source)
    for more in ({}, dict(backbone=LoadsByItself)):
        with refused(faults, CheckpointError, path, 'none of its 6 weights is in the model'):
            detector_runner(folder, stage, dict(backbone_cfg=pretrained(path), **more)).prepare()
    return faults


def head_of_another_size(stage: int, folder: str) -> list[str]:
    """The rest goes in, and strict says what does not."""
    source = seeded(lambda: Detector(classes=9), 9).state_dict()
    path = on_file(f'{folder}/nine {stage}.pth', source)
    backbone = {name: value for name, value in source.items() if name.startswith('backbone.')}
    faults: list[str] = []
    for before in (True, False):
        runner = detector_runner(folder, stage, **(dict(load_from=path) if before else {}))
        runner.prepare()
        if not before:
            runner.load_checkpoint(path)
        found = {name: value for name, value in whole_state(runner.model.module).items() if name in backbone}
        faults += differing(found, backbone)
        with refused(faults, CheckpointError, path, 'head.weight'):
            runner.load_checkpoint(path, strict=True)
    runner = detector_runner(folder, stage)
    with refused(faults, CheckpointError, path, 'head.weight'):
        runner.load_checkpoint(path, strict=True)
    return faults


def read_once(stage: int, folder: str) -> list[str]:
    """Rank 0 reads a file once, other ranks never open it, and all end with its values."""
    source = seeded(Detector, 9).state_dict()
    whole = on_file(f'{folder}/once {stage}.pth', dict(state_dict=source))
    alone = {name.removeprefix('backbone.'): value for name, value in source.items() if name.startswith('backbone.')}
    part = on_file(f'{folder}/alone {stage}.pth', {f'module.{name}': value for name, value in alone.items()})
    ways: dict[str, tuple[str, dict, dict]] = {
        'load_from': (whole, {}, dict(load_from=whole)),
        'init_cfg': (whole, dict(init_cfg=pretrained(whole)), {}),
        'backbone of whole': (whole, dict(backbone_cfg=pretrained(whole, prefix='backbone.')), {}),
        'backbone': (part, dict(backbone_cfg=pretrained(part)), {}),
        'by itself': (part, dict(backbone_cfg=pretrained(part), backbone=LoadsByItself), {}),
    }
    faults = []
    for name, (path, model, changes) in ways.items():
        runner = detector_runner(folder, stage, model, **changes)
        reads = loads_of(path, runner.prepare)
        found = tensors_of(runner.model.module)
        wanted = source if 'backbone_cfg' not in model else {f'backbone.{n}': v for n, v in alone.items()}
        found = {key: value for key, value in found.items() if key in wanted}
        faults += [f'{name}: {text}' for text in [*differing(found, wanted), *reads]]
    runner = detector_runner(folder, stage)
    runner.prepare()
    faults += [f'load_checkpoint: {text}' for text in loads_of(whole, lambda: runner.load_checkpoint(whole))]
    return faults + differing(tensors_of(runner.model.module), source)


def loads_of(path: str, work: Callable[[], Any]) -> list[str]:
    """Run something that reads a file; says where it is not read once by rank 0 alone."""
    before = opened[path]
    with patch.object(torch, 'load', wraps=torch.load) as load:
        work()
    rank = dist.get_rank()
    # torch.distributed sends tensors within objects by it, too.
    calls = [call for call in load.call_args_list if call.args[:1] == (path,)]
    faults = [] if len(calls) == (rank == 0) else [f'read {len(calls)} times']
    return faults + ([] if rank == 0 or opened[path] == before else ['was opened'])


def resumed_once(stage: int, folder: str) -> list[str]:
    """Resuming reads once, too: weights before sharding, optimizer and counters after it."""
    own = f'{folder}/stage {stage}'
    detector_runner(own, stage).train()
    path = f'{own}/work/epoch_1.pth'
    faults = loads_of(path, lambda: torch.load(path, weights_only=True)) if dist.get_rank() == 0 else []
    resumed = detector_runner(own, stage, load_from=path, resume=True, train_cfg=dict(by_epoch=True, max_epochs=1))
    faults += loads_of(path, resumed.train)
    return faults + ([] if resumed.epoch == 1 and resumed.iter == 2 else [f'at {resumed.epoch}, {resumed.iter}'])


def from_mmengine(stage: int, folder: str) -> list[str]:
    """MMEngine's own checkpoint is resumed, with its optimizer and its histories; it needs the allow-list."""
    path = f'{folder}/stock/epoch_1.pth'
    runner = detector_runner(f'{folder}/on {stage}', stage, load_from=path, resume=True, train_cfg=TWO_EPOCHS)
    faults = loads_of(path, runner.train)
    saved = torch.load(path, weights_only=False)
    if runner.epoch != 2 or runner.iter != 5:
        faults.append(f'at epoch {runner.epoch}, iteration {runner.iter}')
    steps = {float(state['step']) for state in runner.optim_wrapper.optimizer.state.values()}
    history, _ = runner.message_hub.get_scalar('train/loss').data
    before, _ = saved['message_hub']['log_scalars']['train/loss'].data
    if steps != {5.0} or list(history[:3]) != list(before) or len(history) != 5:
        faults.append(f'optimizer at {steps}, losses {history} after {before}')
    if dist.get_rank() == 0:
        ours = torch.load(f'{folder}/on {stage}/work/epoch_2.pth', weights_only=True)
        faults += [] if 'best_score' in ours['message_hub']['runtime_info'] else ['no best score is saved']
    return faults


def of_safetensors(stage: int, folder: str) -> list[str]:
    """Weights that fit are read by each rank for its shards, others by rank 0, so that the model may resize them."""
    source = seeded(Detector, 9).state_dict()
    alone = {name: value for name, value in source.items() if name.startswith('backbone.')}
    paths = {name: f'{folder}/{name} {stage}' for name in ('whole.safetensors', 'part.safetensors', 'folder')}
    paths['whole.safetensors'] += '.safetensors'
    paths['part.safetensors'] += '.safetensors'
    if dist.get_rank() == 0:
        save_file(source, paths['whole.safetensors'])
        save_file(alone, paths['part.safetensors'])
        in_two_files(source, paths['folder'])
    dist.barrier()
    faults: list[str] = []
    for name, path in paths.items():
        wanted = alone if name.startswith('part') else source
        for before in (True, False):
            # One checks that weights are initialised, too, where a file has not all.
            runner = detector_runner(folder, stage, **(dict(load_from=path) if before else {}))
            with patch.object(zero_runner_file, 'read_checkpoint', wraps=zero_runner_file.read_checkpoint) as read:
                runner.prepare()
                if not runner._has_loaded:
                    runner.load_checkpoint(path)
            by_rank0 = before and name.startswith('part') and dist.get_rank() == 0
            if read.called != by_rank0:
                faults.append(f'{name}: read whole {read.call_count} times')
            found = {key: value for key, value in tensors_of(runner.model.module).items() if key in wanted}
            faults += [f'{name}, before sharding {before}: {text}' for text in differing(found, wanted)]
    runner = detector_runner(folder, stage, dict(backbone_cfg=pretrained(paths['folder'], prefix='backbone.')))
    runner.prepare()
    found = {key: value for key, value in tensors_of(runner.model.module).items() if key in alone}
    return faults + [f'init_cfg: {text}' for text in differing(found, alone)]


def in_two_files(state: dict[str, torch.Tensor], folder: str) -> None:
    """Write weights as transformers does, with an index, and an optimizer's file beside them that does not belong."""
    os.makedirs(folder)
    names = {name: f'model-{index % 2 + 1}.safetensors' for index, name in enumerate(state)}
    for file in set(names.values()):
        save_file({name: value for name, value in state.items() if names[name] == file}, f'{folder}/{file}')
    save_file({'head.bias': torch.zeros(3)}, f'{folder}/other.safetensors')
    Path(f'{folder}/model.safetensors.index.json').write_text(json.dumps(dict(weight_map=names)))


def not_kept(stage: int, folder: str) -> list[str]:
    """No file stays mapped once it was loaded: one that is written over would end the run by SIGBUS."""
    own = f'{folder}/kept {stage}'
    detector_runner(own, stage).train()
    path = f'{own}/work/epoch_1.pth'
    resumed = detector_runner(own, stage, load_from=path, resume=True, train_cfg=TWO_EPOCHS)
    resumed.train()
    faults = [f'{path} is still mapped'] if is_mapped(path) else []
    read = read_checkpoint(path)
    return faults + ([] if is_mapped(path) and read else [f'{path} is read whole'])


def is_mapped(path: str) -> bool:
    return path in Path('/proc/self/maps').read_text()


TWO_EPOCHS = dict(by_epoch=True, max_epochs=2, val_interval=1)


def traps(stage: int, folder: str) -> list[str]:
    """A file that would run code is refused on every rank, whoever reads it, and does not run."""
    made = f'{folder}/made {stage}'
    path = on_file(f'{folder}/trap {stage}.pth', dict(state_dict=seeded(Detector, 0).state_dict(), x=Trap(made)))
    faults: list[str] = []
    sharded = detector_runner(folder, stage)
    sharded.prepare()
    parts = dict(init_cfg=pretrained(path)), dict(backbone_cfg=pretrained(path, prefix='backbone'))
    attempts = [lambda part=part: detector_runner(folder, stage, part).prepare() for part in parts]
    attempts += [
        lambda: detector_runner(folder, stage, load_from=path).prepare(),
        lambda: detector_runner(folder, stage, load_from=path, resume=True).train(),
        lambda: sharded.load_checkpoint(path),
    ]
    for attempt in attempts:
        with refused(faults, CheckpointError, path, 'mmzero does not run', 'mkdir'):
            attempt()
    return faults + (['it ran'] if os.path.exists(made) else [])


CASES = (
    into_shards,
    nothing_fits,
    head_of_another_size,
    read_once,
    resumed_once,
    from_mmengine,
    of_safetensors,
    not_kept,
    traps,
)


def run_cases(folder: str) -> Faults:
    count_opened_files()
    return {f'{case.__name__} {stage}': case(stage, folder) for case in CASES for stage in STAGES}


@pytest.fixture(scope='module')
def found(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    folder = str(tmp_path_factory.mktemp('weights'))
    stock_run(f'{folder}/stock')
    return merged(run_ranks(2, run_cases, folder))


def stock_run(folder: str) -> None:
    """Train by MMEngine's own Runner."""
    Runner(
        model=seeded(Detector, 1),
        work_dir=folder,
        train_dataloader=loader(),
        val_dataloader=loader(),
        train_cfg=dict(by_epoch=True, max_epochs=1, val_interval=1),
        val_cfg=dict(),
        val_evaluator=dict(type=Count),
        optim_wrapper=dict(type=OptimWrapper, optimizer=dict(type='AdamW', lr=0.01)),
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=1, save_best='count', rule='greater')),
        experiment_name='stock weights',
        log_level='ERROR',
    ).train()


@pytest.mark.parametrize('stage', STAGES)
@pytest.mark.parametrize('case', [case.__name__ for case in CASES])
def test_weights_in(found: Faults, case: str, stage: int) -> None:
    assert not found[f'{case} {stage}'], '\n'.join(found[f'{case} {stage}'])


def test_the_stock_checkpoint_needs_the_allow_list(found: Faults, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = next(Path(tmp_path_factory.getbasetemp()).glob('weights*/stock/epoch_1.pth'))
    with pytest.raises(Exception, match='HistoryBuffer|getattr'):
        torch.load(path, weights_only=True)
