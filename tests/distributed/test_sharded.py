"""Sharded checkpoints: saved on some ranks at some stage, gone on from on others, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.cases import Faults, differing, merged
from tests.distributed.ranks import run_ranks
from tests.vectors import vector_runner

pytestmark = pytest.mark.distributed

UNITS = dict(wrap_policy=dict(type='ModuleClassPolicy', classes=['Block']), find_unused_parameters=True)
SHARDED = dict(format='sharded')
SETTINGS: dict[str, dict[str, Any]] = {
    'stage 0': dict(stage=0),
    'stage 1': dict(stage=1),
    'stage 2': dict(stage=2),
    'stage 3': dict(stage=3),
    'HSDP': dict(stage=3, mesh=dict(replicate=2)),
    'offloaded': dict(stage=3, offload=dict(params='cpu')),
}


def runner_of(folder: str, setting: str, epochs: int, checkpoint: Any = SHARDED, **changes: Any) -> Any:
    """ToyModel, which has tied, frozen and 0-dim parameters, with EMA, a schedule and a scaled loss."""
    fields = dict(SETTINGS[setting])
    wrapper = dict(type='ZeroModelWrapper', **fields, **UNITS)
    torch.manual_seed(0)
    settings: dict[str, Any] = dict(
        train_cfg=dict(by_epoch=True, max_epochs=epochs, val_interval=1),
        optim_wrapper=dict(
            type='AmpOptimWrapper',
            dtype='float16',
            loss_scale=dict(init_scale=2.0**7, growth_interval=2),
            optimizer=dict(type='AdamW', lr=0.01),
            clip_grad=dict(max_norm=0.1),
        ),
        param_scheduler=dict(type='LinearLR', start_factor=0.1, by_epoch=False, end=20),
        custom_hooks=[dict(type='EMAHook', ema_type='MomentumAnnealingEMA', momentum=0.1, gamma=3)],
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=1, max_keep_ckpts=2)),
        cfg=dict(model_wrapper_cfg=wrapper, checkpoint=checkpoint),
    )
    return vector_runner(folder, **{**settings, **changes})


def saved(folder: str, setting: str) -> None:
    """One epoch: a sharded checkpoint, and the same state in a full one, to compare with."""
    runner = runner_of(folder, setting, 1)
    runner.train()
    runner.saves_shards = False
    runner.save_checkpoint(folder, 'full.pth', by_epoch=True, meta=dict(epoch=1, iter=runner.iter))


def loaded(folder: str, name: str, setting: str) -> list[str]:
    """Resume without a step, and save all that was loaded in full."""
    runner = runner_of(f'{folder}/{name}', setting, 1, load_from=f'{folder}/epoch_1', resume=True)
    runner.train()
    runner.saves_shards = False
    runner.save_checkpoint(f'{folder}/{name}', 'again.pth', meta=dict(epoch=1, iter=runner.iter))
    dist.barrier()
    again, full = (torch.load(f'{folder}/{path}', weights_only=True) for path in (f'{name}/again.pth', 'full.pth'))
    faults = differing(flat(again), flat(full))
    for part in ('param_schedulers', 'epoch', 'iter', 'groups', 'loss_scaler'):
        ours, theirs = (taken(checkpoint, part) for checkpoint in (again, full))
        faults += [] if ours == theirs else [f'{part}: {ours}, not {theirs}']
    return faults


def taken(checkpoint: dict[str, Any], part: str) -> Any:
    if part in ('epoch', 'iter'):
        return checkpoint['meta'][part]
    if part == 'groups':
        return checkpoint['optimizer']['param_groups'], checkpoint['optimizer']['param_names']
    return checkpoint['optimizer'][part] if part == 'loss_scaler' else checkpoint[part]


def flat(checkpoint: dict[str, Any]) -> dict[str, torch.Tensor]:
    state = checkpoint['optimizer']['state']
    return {
        **checkpoint['state_dict'],
        **{f'ema {name}': value for name, value in checkpoint['ema_state_dict'].items()},
        **{f'{name} {index}': value for index, entries in state.items() for name, value in entries.items()},
    }


def save_each(folder: str, settings: list[str]) -> None:
    for setting in settings:
        saved(f'{folder}/{setting}', setting)


def load_each(folder: str, froms: list[str], settings: list[str]) -> Faults:
    ranks = dist.get_world_size()
    return {
        f'{source} -> {setting} on {ranks}': loaded(f'{folder}/{source}', f'{setting} on {ranks}', setting)
        for source in froms
        for setting in settings
    }


def of_ranks(ranks: int, settings: list[str]) -> list[str]:
    return [setting for setting in settings if setting != 'HSDP' or ranks == 4]


@pytest.mark.parametrize(
    'there, here, settings',
    [
        (2, 4, ['stage 3', 'HSDP']),
        *(
            pytest.param(a, b, [name for name in SETTINGS if name != 'offloaded'], marks=pytest.mark.slow)
            for a in (1, 2, 4)
            for b in (1, 2, 4)
        ),
        (2, 1, ['stage 0', 'stage 3', 'offloaded']),
    ],
)
def test_state_is_the_saved_one(tmp_path: Path, there: int, here: int, settings: list[str]) -> None:
    run_ranks(there, save_each, str(tmp_path), of_ranks(there, settings))
    found = merged(run_ranks(here, load_each, str(tmp_path), of_ranks(there, settings), of_ranks(here, settings)))
    for case, faults in found.items():
        assert not faults, f'{case}: {faults}'
