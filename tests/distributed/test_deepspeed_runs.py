"""Complete runs on DeepSpeed: averages, val of uneven batches, checkpoints that other engines go on from."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero.checkpoint import save_sharded
from tests.distributed.cases import Faults, differing, merged
from tests.distributed.ranks import run_ranks
from tests.models import ToyModel, toy_batch
from tests.vectors import Vectors, loader, vector_runner

pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed]

PARTITIONED = dict(zero_optimization=dict(stage3_param_persistence_threshold=20))
EMA = dict(type='EMAHook', ema_type='ExponentialMovingAverage', momentum=0.1)


class Plain(ToyModel):
    """Without what DeepSpeed cannot train; a batch norm instead."""

    def __init__(self) -> None:
        super().__init__(scalar=False)
        del self.unused
        # A bias before a norm has no gradient but noise.
        self.stem = torch.nn.Sequential(torch.nn.Linear(12, 12, bias=False), torch.nn.BatchNorm1d(12))


def run(
    folder: str, engine: str, stage: int, epochs: int, half: bool = False, fields: dict | None = None, **changes: Any
) -> Any:
    wrapper: dict[str, Any] = dict(engine=engine)
    wrapper |= fields or dict(engine_options=PARTITIONED) if engine == 'deepspeed' else dict(wrap_policy=None)
    optim = dict(type='AmpOptimWrapper' if half else 'OptimWrapper', optimizer=dict(type='AdamW', lr=0.01))
    torch.manual_seed(0)
    # Five samples of val: two batches on rank 0, one on rank 1.
    data = dict(train_dataloader=loader(Vectors(8)), val_dataloader=loader(Vectors(5), round_up=False))
    settings: dict[str, Any] = dict(
        train_cfg=dict(by_epoch=True, max_epochs=epochs, val_interval=1),
        optim_wrapper=dict(optim, clip_grad=dict(max_norm=1.0)),
        param_scheduler=[dict(type='LinearLR', start_factor=0.5, by_epoch=False, end=6)],
        custom_hooks=[dict(EMA)],
        launcher='pytorch',
    )
    runner = vector_runner(folder, dict(type=Plain), stage, wrapper, **data, **{**settings, **changes})
    runner.train()
    return runner


def kept(path: str) -> dict[str, torch.Tensor]:
    """What a checkpoint holds, its averages, trained weights and state of the optimizer."""
    file = torch.load(path, weights_only=True)
    found = {f'average {name}': value for name, value in file['state_dict'].items()}
    found |= {name: value for name, value in file['ema_state_dict'].items() if name.startswith('module.')}
    for index, entries in file['optimizer']['state'].items():
        found |= {f'{index} {name}': torch.as_tensor(float(v)) if name == 'step' else v for name, v in entries.items()}
    return found


def off(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], bound: float) -> list[str]:
    faults = [f'{name} is on one side only' for name in found.keys() ^ wanted.keys()]
    pairs = [(name, found[name].double(), wanted[name].double()) for name in found.keys() & wanted.keys()]
    return faults + [f'{name} is off' for name, a, b in pairs if (a - b).norm() > bound * (b.norm() + 1e-3)]


def goes_on(folder: str, stage: int, half: bool) -> list[str]:
    """A run of two epochs is one that was resumed after the first, to the bit; averages are in val and in the file."""
    whole = run(f'{folder}/whole', 'deepspeed', stage, 2, half)
    faults = [] if whole.message_hub.get_scalar('val/count').current() == 5 else ['val has not seen 5 samples']
    run(f'{folder}/resumed', 'deepspeed', stage, 1, half)
    run(f'{folder}/resumed', 'deepspeed', stage, 2, half, resume=True)
    if dist.get_rank() == 0:
        found, wanted = (kept(f'{folder}/{name}/epoch_2.pth') for name in ('resumed', 'whole'))
        faults += differing(found, wanted)
        floats = [value.dtype for value in wanted.values() if value.is_floating_point()]
        faults += [] if set(floats) == {torch.float32} else [f'saved in {set(floats)}']
    return faults


def across_engines(folder: str, stage: int) -> list[str]:
    """What FSDP2 began DeepSpeed goes on with, and the other way round, as far as FSDP2 alone would come."""
    run(f'{folder}/whole', 'fsdp2', stage, 2)
    for first, second in (('fsdp2', 'deepspeed'), ('deepspeed', 'fsdp2')):
        run(f'{folder}/{first}', first, stage, 1)
        run(f'{folder}/{first}', second, stage, 2, resume=True)
    if dist.get_rank():
        return []
    wanted = kept(f'{folder}/whole/epoch_2.pth')
    return [
        f'begun by {first}: {fault}'
        for first in ('fsdp2', 'deepspeed')
        for fault in off(kept(f'{folder}/{first}/epoch_2.pth'), wanted, 1e-4)
    ]


def no_batch_at_all(stage: int) -> list[str]:
    """Rank 1 has nothing to evaluate, and takes part; what is found is what every rank finds by itself."""
    torch.manual_seed(0)
    model = ZeroModelWrapper(module=Plain(), stage=stage, engine='deepspeed', engine_options=PARTITIONED)
    optim = ZeroOptimWrapper(torch.optim.AdamW(model.module.parameters()))
    model.train_step(toy_batch(dist.get_rank()), optim)
    model.eval()
    with torch.no_grad():
        wanted = [torch.stack(model.val_step(toy_batch(n))) for n in range(3)]
        own = range(3) if dist.get_rank() == 0 else ()
        found = [torch.stack(model.val_step(batch)) for batch in model.join(map(toy_batch, own), 'val')]
    return [] if all(map(torch.equal, found, wanted)) and len(found) == len(own) else ['other predictions']


def given_weights(folder: str, stage: int, source: str, half: bool) -> list[str]:
    """Files of which each rank reads its part are there after a step with lr 0, loaded before the start and after."""
    torch.manual_seed(1)
    given = {name: value.clone() for name, value in Plain().state_dict().items()}
    if dist.get_rank() == 0 and source.endswith('.safetensors'):
        save_file(given, source)
    if not source.endswith('.safetensors'):
        save_sharded({f'state_dict/{name}': value for name, value in given.items()}, dict(state_dict={}), source)
    dist.barrier()
    kind = dict(type='AmpOptimWrapper', dtype='bfloat16') if half else dict(type='OptimWrapper')
    still = dict(optim_wrapper=dict(kind, optimizer=dict(type='AdamW', lr=0.0, weight_decay=0.0)))
    first = run(f'{folder}/before', 'deepspeed', stage, 1, load_from=source, **still)
    found = first.model.engine.model_state()
    # Once more into one that DeepSpeed has partitioned.
    later = run(f'{folder}/after', 'deepspeed', stage, 1, **still)
    later.load_checkpoint(source, strict=True)
    later.model.train_step(toy_batch(0), later.optim_wrapper)
    again = later.model.engine.model_state()
    if dist.get_rank():
        return []
    own = [name for name in given if 'running' not in name and 'num_batches' not in name]
    return [
        f'{name} {when}'
        for when, state in (('before', found), ('after', again))
        for name in own
        if not torch.equal(state[name], given[name])
    ]


def files(folder: str) -> Faults:
    return {
        f'{name}, {stage}, {half}': given_weights(f'{folder}/{stage}{half}', stage, f'{folder}/{name}', half)
        for name in ('weights.safetensors', 'weights')
        for stage, half in ((2, False), (3, False), (3, True))
    }


def test_files_of_others(tmp_path: Any) -> None:
    for case, faults in merged(run_ranks(2, files, str(tmp_path))).items():
        assert not faults, f'{case}: {faults}'


def runs(folder: str, stages: tuple[int, ...]) -> Faults:
    found: Faults = {}
    for stage in stages:
        found[f'{stage}, float32'] = goes_on(f'{folder}/{stage}', stage, False)
        found[f'{stage}, bfloat16'] = goes_on(f'{folder}/{stage}half', stage, True)
        found[f'{stage}, no batch'] = no_batch_at_all(stage)
        found[f'{stage}, across engines'] = across_engines(f'{folder}/{stage}across', stage)
    return found


@pytest.mark.parametrize('stages', [(3,), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_runs(stages: tuple[int, ...], tmp_path: Any) -> None:
    for case, faults in merged(run_ranks(2, runs, str(tmp_path), stages)).items():
        assert not faults, f'{case}: {faults}'
