"""Sharded checkpoints of DeepSpeed's runs and of FSDP2's: each goes on from the other's, on other numbers of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mmzero.checkpoint.convert import whole_checkpoint
from mmzero.checkpoint.scratch import scratch_beside
from tests.distributed.cases import Faults, differing, merged
from tests.distributed.ranks import run_ranks
from tests.distributed.test_deepspeed_runs import PARTITIONED
from tests.distributed.test_deepspeed_state import OTHERS
from tests.distributed.test_sharded import SHARDED, UNITS, Losses, flat, taken
from tests.models import ToyModel
from tests.vectors import Vectors, loader, vector_runner

pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed]

Setting = tuple[str, int, bool]
"""Engine, stage, and whether in bfloat16."""

FSDP2, DEEPSPEED = ('fsdp2', 3, False), ('deepspeed', 3, False)
ALL = [(engine, stage, False) for engine in ('fsdp2', 'deepspeed') for stage in (2, 3)]
HALF = [('deepspeed', stage, True) for stage in (1, 2, 3)]


class Odd(ToyModel):
    """With tied and frozen parameters, and a weight of four dimensions that ranks cut anywhere."""

    def __init__(self, filters: int = 3) -> None:
        super().__init__(scalar=False)
        del self.unused
        self.filters = torch.nn.Parameter(torch.randn(filters, 5, 2, 7))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None, mode: str = 'tensor') -> Any:
        return super().forward(inputs + self.filters.square().mean(), labels, mode)


def run_of(
    folder: str,
    setting: Setting,
    epochs: int,
    checkpoint: Any = SHARDED,
    fields: Any = None,
    filters: int = 3,
    **changes: Any,
) -> Any:
    engine, stage, half = setting
    wrapper: dict[str, Any] = dict(type='ZeroModelWrapper', stage=stage, engine=engine)
    wrapper |= dict(engine_options=PARTITIONED) if engine == 'deepspeed' else UNITS
    wrapper |= fields or {}
    # Eight samples per step on any number of ranks.
    data = loader(Vectors(40))
    data['batch_size'] = 8 // dist.get_world_size()
    optim = dict(type='AmpOptimWrapper', dtype='bfloat16') if half else dict(type='OptimWrapper')
    torch.manual_seed(0)
    runner = vector_runner(
        folder,
        Odd(filters),
        train_dataloader=data,
        val_cfg=None,
        val_dataloader=None,
        val_evaluator=None,
        train_cfg=dict(by_epoch=True, max_epochs=epochs),
        optim_wrapper=dict(optim, optimizer=dict(type='AdamW', lr=0.01), clip_grad=dict(max_norm=0.1)),
        param_scheduler=dict(type='LinearLR', start_factor=0.1, by_epoch=False, end=20),
        custom_hooks=[dict(type='EMAHook', ema_type='ExponentialMovingAverage', momentum=0.1)],
        launcher='pytorch',
        cfg=dict(model_wrapper_cfg=wrapper, checkpoint=checkpoint),
        **changes,
    )
    losses = Losses()
    runner.register_hook(losses)
    runner.train()
    return runner, losses.values


def saved(folder: str, settings: list[Setting], checkpoint: dict[str, Any]) -> None:
    """One epoch each: a sharded checkpoint, and the same state in a full one, to compare with."""
    for setting in settings:
        path = f'{folder}/{named(setting)}'
        runner, _ = run_of(path, setting, 1, checkpoint)
        runner.saves_shards = False
        runner.save_checkpoint(path, 'full.pth', by_epoch=True, meta=dict(epoch=1, iter=runner.iter))


def named(setting: Setting) -> str:
    return ' '.join(map(str, setting))


def loaded(folder: str, setting: Setting) -> list[str]:
    """What is resumed is what was saved, to the bit."""
    mine = f'{folder}/{named(setting)} on {dist.get_world_size()}'
    runner, _ = run_of(mine, setting, 1, load_from=f'{folder}/epoch_1', resume=True)
    runner.saves_shards = False
    runner.save_checkpoint(mine, 'again.pth', meta=dict(epoch=1, iter=runner.iter))
    dist.barrier()
    again, full = (torch.load(path, weights_only=True) for path in (f'{mine}/again.pth', f'{folder}/full.pth'))
    faults = differing(flat(again), flat(full))
    for part in ('param_schedulers', 'epoch', 'iter', 'groups'):
        faults += [] if taken(again, part) == taken(full, part) else [part]
    return faults


def load_each(folder: str, sources: list[Setting], settings: list[Setting]) -> Faults:
    return {
        f'{named(source)} -> {named(setting)} on {dist.get_world_size()}': loaded(f'{folder}/{named(source)}', setting)
        for source in sources
        for setting in settings
    }


@pytest.mark.parametrize(
    'there, here, sources, settings',
    [
        (2, 4, [FSDP2, DEEPSPEED, HALF[2]], [FSDP2, DEEPSPEED, HALF[1]]),
        *(
            pytest.param(there, here, [*ALL, *HALF], [*ALL, *HALF], marks=pytest.mark.slow)
            for there, here in ((2, 4), (4, 1), (1, 2))
        ),
    ],
)
def test_state_is_the_saved_one(
    tmp_path: Path, there: int, here: int, sources: list[Setting], settings: list[Setting]
) -> None:
    run_ranks(there, saved, str(tmp_path), sources, dict(SHARDED, async_save=True))
    for case, faults in merged(run_ranks(here, load_each, str(tmp_path), sources, settings)).items():
        assert not faults, f'{case}: {faults}'


def goes_on(folder: str, setting: Setting, fields: dict[str, Any], **changes: Any) -> list[str]:
    """A broken run ends as the unbroken one, to the bit."""
    run_of(f'{folder}/whole', setting, 2, fields=fields, **changes)
    run_of(f'{folder}/broken', setting, 1, fields=fields, **changes)
    runner, _ = run_of(f'{folder}/broken', setting, 2, fields=fields, resume=True, **changes)
    faults = [] if runner.iter == runner.max_iters else [f'ended at {runner.iter}']
    dist.barrier()
    ends = []
    for name in ('broken', 'whole'):
        path = f'{folder}/{name}/epoch_2'
        with scratch_beside(f'{path}-{dist.get_rank()}') as scratch:
            ends.append({key: value.clone() for key, value in flat(whole_checkpoint(path, scratch)).items()})
    return faults + differing(*ends)


def other_settings(folder: str) -> Faults:
    return {
        f'{name}, {stage}, {half}': goes_on(f'{folder}/{name} {stage} {half}', ('deepspeed', stage, half), fields)
        for name, (fields, stages) in OTHERS.items()
        for stage in stages
        for half in (False, True)
    }


@pytest.mark.slow
def test_other_settings_go_on(tmp_path: Path) -> None:
    for case, faults in merged(run_ranks(2, other_settings, str(tmp_path))).items():
        assert not faults, f'{case}: {faults}'


def losses_of(folder: str, setting: Setting, epochs: int, **changes: Any) -> list[float]:
    return run_of(folder, setting, epochs, **changes)[1]


def losses_after(folder: str, setting: Setting, first: str) -> list[float]:
    return losses_of(folder, setting, 2, load_from=first, resume=True)


@pytest.mark.parametrize('stage', [3, pytest.param(2, marks=pytest.mark.slow)])
def test_runs_go_on_under_the_other_engine(tmp_path: Path, stage: int) -> None:
    """Losses of the next epoch on 4 ranks and on 1 are those of FSDP2's unbroken run on 2."""
    whole = run_ranks(2, losses_of, str(tmp_path / 'whole'), ('fsdp2', stage, False), 2)[0]
    assert len(whole) == 10
    run_ranks(2, losses_of, str(tmp_path / 'half'), ('deepspeed', stage, False), 1)
    for first, engine, ranks in (('whole', 'deepspeed', 4), ('half', 'fsdp2', 1)):
        place, begun = str(tmp_path / engine), str(tmp_path / first / 'epoch_1')
        found = run_ranks(ranks, losses_after, place, (engine, stage, False), begun)[0]
        assert found == pytest.approx(whole[5:], rel=1e-6)
