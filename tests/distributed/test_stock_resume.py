"""A run of MMEngine's own Runner under DDP goes on under mmzero: weights, averages, optimizer, schedulers, counters."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.hooks import EMAHook
from mmengine.runner import Runner

from tests.distributed.cases import Faults, differing, merged
from tests.distributed.detector import Detector, detector_runner, whole_state
from tests.distributed.ranks import run_ranks
from tests.vectors import Count, loader

pytestmark = pytest.mark.distributed

STAGES = (0, 2, 3)
FIELDS: dict[str, Any] = dict(
    optim_wrapper=dict(
        type='OptimWrapper',
        optimizer=dict(type='AdamW', lr=0.01, weight_decay=0.1),
        paramwise_cfg=dict(norm_decay_mult=0.0, custom_keys={'head': dict(lr_mult=0.1)}),
        clip_grad=dict(max_norm=1.0),
    ),
    param_scheduler=[
        dict(type='LinearLR', begin=0, end=1, by_epoch=False),
        dict(type='CosineAnnealingLR', begin=1, T_max=20, by_epoch=False),
    ],
    custom_hooks=[dict(type='EMAHook', momentum=0.1)],
    default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=1, save_best='count', rule='greater')),
)


def train_by_mmengine(folder: str) -> None:
    torch.manual_seed(0)
    Runner(
        model=Detector(),
        work_dir=folder,
        train_dataloader=loader(),
        val_dataloader=loader(),
        train_cfg=dict(by_epoch=True, max_epochs=1, val_interval=1),
        val_cfg=dict(),
        val_evaluator=dict(type=Count),
        launcher='pytorch',
        cfg=dict(model_wrapper_cfg=dict(type='MMDistributedDataParallel', device_ids=None, broadcast_buffers=False)),
        experiment_name='stock with averages',
        log_level='ERROR',
        **FIELDS,
    ).train()
    dist.barrier()


def goes_on(folder: str, stage: int) -> list[str]:
    path = f'{folder}/stock/epoch_1.pth'
    runner = detector_runner(f'{folder}/on {stage}', stage, load_from=path, resume=True, **FIELDS)
    runner.train()
    saved = torch.load(path, weights_only=False)
    # MMEngine saves the averages as the weights, and the weights under the names of the averages.
    weights = {name.removeprefix('module.'): value for name, value in saved['ema_state_dict'].items()}
    steps = weights.pop('steps')
    hook = next(hook for hook in runner.hooks if isinstance(hook, EMAHook))
    averages = hook.parts.gather(hook.ema_model.module.state_dict())
    faults = differing(whole_state(runner.model.module), weights)
    faults += differing(averages, saved['state_dict']) if dist.get_rank() == 0 else []
    found: dict[str, Any] = dict(
        steps=int(hook.ema_model.steps),
        at=(runner.epoch, runner.iter),
        schedulers=[scheduler.state_dict() for scheduler in runner.param_schedulers],
        best=runner.message_hub.get_info('best_score'),
        losses=list(runner.message_hub.get_scalar('train/loss').data[0]),
    )
    wanted = dict(
        steps=int(steps),
        at=(1, saved['meta']['iter']),
        schedulers=saved['param_schedulers'],
        best=saved['message_hub']['runtime_info']['best_score'],
        losses=list(saved['message_hub']['log_scalars']['train/loss'].data[0]),
    )
    faults += [f'{key}: {found[key]} and not {wanted[key]}' for key in wanted if found[key] != wanted[key]]
    optimizer = runner.optim_wrapper.state_dict()
    if dist.get_rank() == 0:
        faults += differing(flat(optimizer), flat(saved['optimizer']))
        groups = [dict(group) for group in optimizer['param_groups']]
        faults += [] if groups == saved['optimizer']['param_groups'] else ['the groups differ']
    return faults


def flat(optimizer: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {f'{i}.{key}': value for i, own in optimizer['state'].items() for key, value in own.items()}


def run_cases(folder: str) -> Faults:
    train_by_mmengine(f'{folder}/stock')
    return {str(stage): goes_on(folder, stage) for stage in STAGES}


@pytest.fixture(scope='module')
def found(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return merged(run_ranks(2, run_cases, str(tmp_path_factory.mktemp('stock'))))


@pytest.mark.parametrize('stage', STAGES)
def test_it_goes_on(found: Faults, stage: int) -> None:
    assert not found[str(stage)], '\n'.join(found[str(stage)])
