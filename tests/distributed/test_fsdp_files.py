"""What MMEngine's FSDPStrategy has saved goes on under mmzero, whole or as local shards."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mmzero.checkpoint import read_checkpoint
from mmzero.errors import CheckpointError
from tests.distributed.cases import Faults, differing, merged, refused
from tests.distributed.detector import detector_runner, whole_state
from tests.distributed.ranks import run_ranks
from tests.distributed.stock_fsdp import KINDS, SCHEDULER, TiedDetector, optim_wrapper, train_by_fsdp

pytestmark = pytest.mark.distributed

STAGES = (0, 2, 3)


def resuming(folder: str, kind: str, stage: int, use_orig_params: bool) -> Any:
    return detector_runner(
        f'{folder}/on {kind} {stage}, {use_orig_params}',
        stage,
        dict(type=TiedDetector),
        load_from=f'{folder}/{kind}/epoch_1.pth',
        resume=True,
        optim_wrapper=optim_wrapper(use_orig_params),
        param_scheduler=dict(SCHEDULER),
    )


def resumed(folder: str, kind: str, stage: int) -> list[str]:
    """Weights, the optimizer by names, schedulers and counters."""
    runner = resuming(folder, kind, stage, KINDS[kind][1])
    runner.train()
    truth = torch.load(f'{folder}/{kind}/truth.pth', weights_only=True)
    faults = differing(whole_state(runner.model.module), truth['state_dict'])
    faults += [] if (runner.epoch, runner.iter) == (1, 2) else [f'at {runner.epoch}, {runner.iter}']
    faults += [] if runner.param_schedulers[0].last_step == 1 else ['another step of the scheduler']
    found = runner.optim_wrapper.engine.optimizer_state()
    if dist.get_rank() == 0:
        names = [name for group in found['param_names'] for name in group]
        flat = {f'{names[i]}.{key}': value for i, own in found['state'].items() for key, value in own.items()}
        wanted = {f'{n}.{key}': value for n, own in truth['optimizer']['state'].items() for key, value in own.items()}
        faults += differing(flat, wanted)
        decays = {n: g['weight_decay'] for g in truth['optimizer']['param_groups'] for n in g['params']}
        for group, own in zip(found['param_groups'], found['param_names'], strict=True):
            faults += [f'decay of {name}' for name in own if group['weight_decay'] != decays[name]]
    return faults


def loaded_later(folder: str, kind: str, stage: int) -> list[str]:
    """Into shards."""
    runner = detector_runner(f'{folder}/on {kind} {stage}', stage, dict(type=TiedDetector))
    runner.prepare()
    runner.load_checkpoint(f'{folder}/{kind}/epoch_1.pth', strict=True)
    truth = torch.load(f'{folder}/{kind}/truth.pth', weights_only=True)
    return differing(whole_state(runner.model.module), truth['state_dict'])


def other_groups(folder: str, kind: str, stage: int) -> list[str]:
    """An optimizer with other groups is refused on every rank."""
    faults: list[str] = []
    runner = resuming(folder, kind, stage, not KINDS[kind][1])
    with refused(faults, CheckpointError, 'groups and this run', 'paramwise_cfg'):
        runner.train()
    return faults


def run_cases(folder: str) -> Faults:
    train_by_fsdp(folder)
    cases = (resumed, loaded_later, other_groups)
    return {
        f'{case.__name__}, {kind}, {stage}': case(folder, kind, stage)
        for case in cases
        for kind in KINDS
        for stage in STAGES
    }


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp('fsdp')


@pytest.fixture(scope='module')
def found(folder: Path) -> Faults:
    return merged(run_ranks(2, run_cases, str(folder)))


@pytest.mark.parametrize('stage', STAGES)
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('case', ['resumed', 'loaded_later', 'other_groups'])
def test_files_of_fsdp(found: Faults, case: str, kind: str, stage: int) -> None:
    name = f'{case}, {kind}, {stage}'
    assert not found[name], '\n'.join(found[name])


def test_local_shards_without_the_model(found: Faults, folder: Path) -> None:
    """Names and shapes are in the optimizer's state, but for those of tied weights; a buffer stands there whole."""
    loaded = read_checkpoint(f'{folder}/local, flat/epoch_1.pth')
    truth = torch.load(folder / 'local, flat' / 'truth.pth', weights_only=True)['state_dict']
    truth.pop('tied.weight')
    assert not differing(loaded['state_dict'], truth)
    assert loaded['meta']['iter'] == 2
    with pytest.raises(CheckpointError, match=r'tied.weight has no shape in it: give it as load_from'):
        read_checkpoint(f'{folder}/local/epoch_1.pth')


def test_faults_of_local_shards(found: Faults, folder: Path, tmp_path: Path) -> None:
    source = folder / 'local, flat' / 'epoch_1.pth'
    with pytest.raises(CheckpointError, match="one rank's shards; give the folder"):
        read_checkpoint(str(source / 'rank1.pth'))
    shutil.copy(source / 'rank0.pth', tmp_path)
    with pytest.raises(CheckpointError, match='saved by 2 ranks and lacks rank1.pth'):
        read_checkpoint(str(tmp_path))
    shutil.copy(source / 'rank1.pth', tmp_path)
    with pytest.raises(CheckpointError, match='_flat_param has 98 elements there and 124 in the model'):
        read_checkpoint(str(tmp_path), TiedDetector(classes=9).state_dict())
