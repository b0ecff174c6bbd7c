"""Nodes with disks of their own: full checkpoints work there, and of sharded ones it is told before training."""

import errno
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from mmzero.checkpoint import check_shared, shared
from mmzero.errors import CheckpointError
from tests.distributed.cases import Faults, merged, refused
from tests.distributed.ranks import run_ranks
from tests.distributed.test_within_epoch import watched
from tests.vectors import vector_runner

pytestmark = pytest.mark.distributed

# The same path on every rank, and another folder.
OWN = '/proc/self/cwd'


def on_own_disk(folder: str) -> None:
    disk = Path(folder, f'disk {dist.get_rank()}')
    disk.mkdir(parents=True, exist_ok=True)
    os.chdir(disk)
    shared.PATIENCE_SECONDS = 0.2


def trained(
    folder: str, sharded: bool, iterations: int = 4, saving: dict | None = None, **changes: Any
) -> tuple[Any, list[float]]:
    torch.manual_seed(0)
    runner = vector_runner(
        folder,
        train_cfg=dict(by_epoch=False, max_iters=iterations),
        # MMEngine's metrics collect results through files in the current folder.
        val_cfg=None,
        val_dataloader=None,
        val_evaluator=None,
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=2, by_epoch=False, **(saving or {}))),
        cfg=dict(
            model_wrapper_cfg=dict(type='ZeroModelWrapper', stage=3),
            checkpoint=dict(format='sharded' if sharded else 'full'),
        ),
        **changes,
    )
    return runner, watched(runner, None).losses


def files(folder: str) -> list[str]:
    dist.barrier()
    return sorted(path.name for path in Path(folder).iterdir() if path.suffix == '.pth' or path.name.startswith('.mm'))


def full(folder: str) -> list[str]:
    """Rank 0 writes and reads."""
    on_own_disk(folder)
    _, whole = trained(f'{OWN}/whole', False)
    trained(f'{OWN}/run', False, 2)
    names = files('run')
    faults = [] if names == (['iter_2.pth'] if dist.get_rank() == 0 else []) else [f'{names}']
    _, again = trained(f'{OWN}/run', False, resume=True)
    faults += [] if again == whole[2:] else [f'{again}, not {whole[2:]}']
    # By its name: the second rank is on the second node.
    with patch.dict(os.environ, GROUP_RANK=str(dist.get_rank())):
        _, again = trained(f'{OWN}/named', False, resume=True, load_from=f'{OWN}/run/iter_2.pth')
    return faults + ([] if again == whole[2:] else [f'{again}, not {whole[2:]} by its name'])


def sharded(folder: str) -> list[str]:
    """Told before the model is sharded."""
    on_own_disk(folder)
    faults: list[str] = []
    with (
        patch('mmzero.runner.zero_runner.ZeroRunner.prepare', side_effect=AssertionError('it has begun')),
        refused(faults, CheckpointError, f'{OWN}/run: rank 1 on ', 'does not see what rank 0', "format='full'"),
    ):
        trained(f'{OWN}/run', True)
    return faults + [f'{name} is left' for name in files('run')]


def sharded_source(folder: str) -> list[str]:
    """A full run goes on from a folder of shards that rank 0 alone sees."""
    on_own_disk(folder)
    trained(f'{folder}/shared', True, 2)
    dist.barrier()
    if dist.get_rank() == 0:
        Path(folder, 'shared', 'iter_2').rename('iter_2')
    dist.barrier()
    faults: list[str] = []
    with (
        patch.dict(os.environ, GROUP_RANK=str(dist.get_rank())),
        refused(faults, CheckpointError, f'{OWN}/iter_2: rank 1 on ', 'does not see'),
    ):
        trained(f'{OWN}/run', False, resume=True, load_from=f'{OWN}/iter_2')
    return faults


def safetensors_source(folder: str) -> list[str]:
    """Weights that each rank would read for itself are read by rank 0 where the others do not see them."""
    on_own_disk(folder)
    runner, _ = trained(f'{OWN}/source', False, 2)
    weights = runner.model.engine.model_state()
    if dist.get_rank() == 0:
        save_file(weights, 'weights.safetensors')
    dist.barrier()
    with patch.dict(os.environ, GROUP_RANK=str(dist.get_rank())):
        again = vector_runner(f'{OWN}/run', stage=3, load_from=f'{OWN}/weights.safetensors')
        again.prepare()
        again.load_or_resume()
    found = again.model.engine.model_state()
    return [f'{name} differs' for name, value in weights.items() if not torch.equal(found[name], value)]


def read_only(folder: str) -> list[str]:
    """On the second rank, or on the first."""
    shared.PATIENCE_SECONDS = 0.2
    error = OSError(errno.EROFS, os.strerror(errno.EROFS))
    faults: list[str] = []
    with refused(faults, CheckpointError, 'rank 1 on ', 'cannot write (Read-only file system) beside what rank 0'):
        with patch.object(Path, 'touch', side_effect=error if dist.get_rank() == 1 else None):
            check_shared(folder)
    with refused(faults, CheckpointError, f'checkpoints cannot be saved to {folder}', 'Read-only file system'):
        with patch.object(Path, 'mkdir', side_effect=error):
            check_shared(folder)
    with refused(faults, CheckpointError, f'checkpoints cannot be saved to {folder}/file', 'Not a directory'):
        if dist.get_rank() == 0:
            Path(folder, 'file').write_text('')
        trained(f'{folder}/run', False, saving=dict(out_dir=f'{folder}/file'))
    check_shared(folder)
    return faults + [f'{name} is left' for name in files(folder)]


def each(folder: str) -> Faults:
    found: Faults = {}
    for case in (full, sharded, sharded_source, safetensors_source, read_only):
        path = f'{folder}/{case.__name__}'
        if dist.get_rank() == 0:
            os.mkdir(path)
        dist.barrier()
        found[case.__name__] = case(path)
        os.chdir('/')
    return found


def test_disks_of_nodes(tmp_path: Path) -> None:
    for case, faults in merged(run_ranks(2, each, str(tmp_path))).items():
        assert not faults, f'{case}: {faults}'
