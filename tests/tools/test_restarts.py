"""torchrun --max-restarts: a rank is killed, all are started again, and the run joins the unbroken loss curve."""

import sys
from pathlib import Path
from typing import Any

import pytest
from mmengine.config import Config

from tests.distributed.ranks import _free_port
from tests.distributed.test_killed_saves import losses
from tests.tools.processes import ROOT, TORCHRUN, run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STATIC = (sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node')
ITERATIONS, KILLED_AFTER = 12, 7


def config(folder: Path, by_epoch: bool, sharded: bool, **changes: Any) -> Path:
    """On vectors, with dropout in nothing and a checkpoint every second iteration."""
    folder.mkdir(parents=True, exist_ok=True)
    length = dict(max_epochs=3) if by_epoch else dict(max_iters=ITERATIONS)
    sampler = dict(type='DefaultSampler' if by_epoch else 'InfiniteSampler', shuffle=True)
    cfg = dict(
        runner_type='mmzero.ZeroRunner',
        default_scope='mmengine',
        work_dir=str(folder / 'work'),
        model=dict(type='tests.models.ToyModel'),
        model_wrapper_cfg=dict(type='ZeroModelWrapper', stage=3),
        checkpoint=dict(format='sharded', async_save=True) if sharded else dict(format='full'),
        train_dataloader=dict(
            batch_size=2,
            num_workers=0,
            dataset=dict(type='tests.vectors.Vectors', size=16),
            sampler=sampler,
            collate_fn=dict(type='default_collate'),
        ),
        train_cfg=dict(by_epoch=by_epoch, **length),
        optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=0.01)),
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=2, by_epoch=False, max_keep_ckpts=2)),
        custom_hooks=[
            dict(type='tests.distributed.test_killed_saves.Curve', path=str(folder / 'curve.jsonl')),
            dict(type='mmzero.hooks.PreemptionHook', every=2),
        ],
        randomness=dict(seed=0),
    )
    cfg['custom_hooks'] += changes.get('hooks', [])
    Config(cfg).dump(folder / 'config.py')
    return folder / 'config.py'


def train(launch: Any, path: Path, *arguments: str) -> Any:
    return run(*launch, '2', *arguments, ROOT / 'tools/train.py', path, '--launcher', 'pytorch', timeout=300)


@pytest.mark.parametrize(
    'by_epoch, sharded, rank, rendezvous', [(False, False, 1, ()), (True, True, 0, ()), (False, True, 1, ('static',))]
)
def test_a_killed_rank(tmp_path: Path, by_epoch: bool, sharded: bool, rank: int, rendezvous: tuple[str, ...]) -> None:
    launch = (*STATIC[:-1], '--master-port', str(_free_port()), STATIC[-1]) if rendezvous else TORCHRUN
    whole = train(launch, config(tmp_path / 'whole', by_epoch, sharded))
    assert whole.returncode == 0, whole.stdout[-3000:]
    unbroken = dict(losses(tmp_path / 'whole' / 'curve.jsonl'))
    assert len(unbroken) == ITERATIONS
    kill = dict(type='tests.tools.restarts.KillOnce', rank=rank, after=KILLED_AFTER, note=str(tmp_path / 'killed'))
    path = config(tmp_path / 'broken', by_epoch, sharded, hooks=[kill])
    done = train(launch, path, '--max-restarts', '1')
    assert done.returncode == 0, done.stdout[-5000:]
    assert 'torchrun has started this run again: it goes on from' in done.stdout
    found = losses(tmp_path / 'broken' / 'curve.jsonl')
    assert [(step, loss) for step, loss in found if unbroken[step] != loss] == []
    steps = [step for step, _ in found]
    # Not from the start, and with no iteration left out.
    assert steps.count(0) == 1
    assert sorted(set(steps)) == list(range(ITERATIONS))
    left = [item.name for item in (tmp_path / 'broken' / 'work').iterdir() if item.name.endswith('.part')]
    assert not left
