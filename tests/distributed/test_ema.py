"""EMAHook over shards: the averages that DDP and MMEngine's hook have, in val, in checkpoints and after a resume."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.hooks import EMAHook, Hook
from mmengine.model import BaseModel, BaseTTAModel, MMDistributedDataParallel
from mmengine.optim import OptimWrapper
from torch import nn

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero.analysis.collectives import CollectiveLog
from mmzero.hooks import over_shards
from tests.distributed.cases import Faults, differing, merged
from tests.distributed.ranks import run_ranks
from tests.distributed.training import full
from tests.models import ToyModel, toy_batch
from tests.vectors import Vectors, loader, vector_runner

pytestmark = pytest.mark.distributed

STEPS = 20
AVERAGES: list[dict[str, Any]] = [
    dict(ema_type='ExponentialMovingAverage', momentum=0.05),
    dict(ema_type='ExponentialMovingAverage', momentum=0.05, interval=3, begin_iter=4),
    dict(ema_type='ExponentialMovingAverage', momentum=0.05, update_buffers=True),
    dict(ema_type='MomentumAnnealingEMA', momentum=0.02, gamma=7),
    dict(ema_type='StochasticWeightAverage', device='cpu'),
    dict(ema_type='mmdet.ExpMomentumEMA', momentum=0.02, gamma=7),
]
UNITS = dict(type='ModuleClassPolicy', classes=['Block'])


class Normed(BaseModel):
    """ToyModel, which has tied, frozen and 0-dim parameters, behind a batch norm, which has statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)
        self.toy = ToyModel()

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        return self.toy(self.norm(inputs), labels, mode)


def averaged(fields: dict | None, ema: dict[str, Any]) -> dict[str, Any]:
    """Train with the hook, by stock DDP without fields, and note what it averaged and val saw."""
    torch.manual_seed(0)
    net = Normed()
    hook = EMAHook(**copy.deepcopy(ema))
    if fields is None:
        model: Any = MMDistributedDataParallel(
            net, device_ids=None, broadcast_buffers=False, find_unused_parameters=True
        )
        optim: Any = OptimWrapper(torch.optim.AdamW(net.parameters(), lr=0.01))
    else:
        model = ZeroModelWrapper(module=net, wrap_policy=UNITS, find_unused_parameters=True, **fields)
        optim = ZeroOptimWrapper(torch.optim.AdamW(net.parameters(), lr=0.01))
        over_shards(hook)
    optim.initialize_count_status(model, 0, 100)
    runner = SimpleNamespace(model=model, sharded=model, iter=0, epoch=0, max_iters=100, max_epochs=1)
    hook.before_run(runner)
    communicated = 0
    for runner.iter in range(STEPS):
        model.train()
        model.train_step(toy_batch(runner.iter * dist.get_world_size() + dist.get_rank()), optim)
        with CollectiveLog() as log:
            hook.after_train_iter(runner, runner.iter)
        communicated += len(log.calls)
        if runner.iter == STEPS // 2:
            seen = swapped(hook, runner, model)
    return dict(seen=seen, weights=state_of(hook), communicated=communicated, steps=int(hook.ema_model.steps))


def swapped(hook: Any, runner: Any, model: Any) -> torch.Tensor:
    """What val sees of some data; training goes on with the trained weights."""
    batch = toy_batch(99)
    hook.before_val_epoch(runner)
    model.eval()
    with torch.no_grad():
        found = torch.stack(model.val_step(batch) if hasattr(model, 'val_step') else model.module.val_step(batch))
    hook.after_val_epoch(runner)
    return found


def state_of(hook: Any) -> dict[str, torch.Tensor]:
    """The averaged weights, whole, on rank 0."""
    if not hasattr(hook, 'parts'):
        return {name: full(value) for name, value in hook.ema_model.module.state_dict().items()}
    return hook.parts.gather(hook.ema_model.module.state_dict())


def compare(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    faults = [f'{what}: {found[what]}, not {wanted[what]}' for what in ('steps',) if found[what] != wanted[what]]
    faults += [f'{found["communicated"]} collectives'] if found['communicated'] else []
    off = float((found['seen'] - wanted['seen']).abs().max())
    faults += [f'val is {off:.0e} off'] if not off <= 1e-5 else []
    if dist.get_rank():
        return faults
    if found['weights'].keys() != wanted['weights'].keys():
        return [*faults, f'{found["weights"].keys() ^ wanted["weights"].keys()}']
    torch.manual_seed(0)
    before = Normed().state_dict()
    pairs = [(found['weights'][name], value, before[name]) for name, value in wanted['weights'].items()]
    floats = [(a.flatten(), b.flatten(), c.flatten()) for a, b, c in pairs if b.is_floating_point()]
    moved = torch.cat([b - c for _, b, c in floats]).norm()
    apart = torch.cat([a - b for a, b, _ in floats]).norm()
    return faults + ([] if apart <= 1e-5 * moved else [f'the average is {apart / moved:.0e} off'])


def averages(stages: tuple[int, ...]) -> Faults:
    found: Faults = {}
    meshes = [dict(mesh=dict(replicate=2))] if dist.get_world_size() == 4 else []
    for ema in AVERAGES:
        wanted = averaged(None, ema)
        for fields in [dict(stage=stage) for stage in stages] + [dict(stage=3, **mesh) for mesh in meshes]:
            found[f'{ema}, {fields}'] = compare(averaged(fields, ema), wanted)
    return found


@pytest.mark.parametrize('ranks, stages', [(2, (0, 1, 3)), pytest.param(4, (1, 2, 3), marks=pytest.mark.slow)])
def test_averages_are_those_of_ddp(ranks: int, stages: tuple[int, ...]) -> None:
    for case, faults in merged(run_ranks(ranks, averages, stages)).items():
        assert not faults, f'{case}: {faults}'


HOOK = dict(type='EMAHook', ema_type='MomentumAnnealingEMA', momentum=0.1, gamma=3)


def runner_of(folder: str, stage: int, epochs: int, **changes: Any) -> Any:
    wrapper = dict(wrap_policy=UNITS, find_unused_parameters=True)
    train_cfg = dict(by_epoch=True, max_epochs=epochs, val_interval=1)
    hooks = changes.pop('custom_hooks', [dict(HOOK)])
    torch.manual_seed(0)
    data, around = loader(Vectors(8)), changes.pop('around', None)
    model = Normed() if around is None else around(Normed())
    return vector_runner(
        folder, model, stage, wrapper, train_dataloader=data, train_cfg=train_cfg, custom_hooks=hooks, **changes
    )


def through_the_runner(folder: str, stage: int, other: int) -> list[str]:
    """Broken after the first epoch and resumed, at the same and at another stage, against the unbroken run."""
    faults = []
    whole = runner_of(f'{folder}/whole', stage, 2)
    whole.train()
    runner_of(f'{folder}/broken', stage, 1).train()
    saved = torch.load(f'{folder}/broken/epoch_1.pth', weights_only=True)
    same = torch.load(f'{folder}/whole/epoch_1.pth', weights_only=True)
    faults += differing(saved['state_dict'], same['state_dict'])
    faults += differing(saved['ema_state_dict'], same['ema_state_dict'])
    moved = [name for name, value in saved['state_dict'].items() if 'toy.stem' in name]
    if any(torch.equal(saved['state_dict'][name], saved['ema_state_dict'][f'module.{name}']) for name in moved):
        faults.append('the averaged weights are the trained ones')
    again = runner_of(f'{folder}/broken', stage, 2, resume=True)
    again.train()
    ends = [torch.load(f'{folder}/{name}/epoch_2.pth', weights_only=True) for name in ('whole', 'broken')]
    for part in ('state_dict', 'ema_state_dict'):
        faults += [f'{part}: {fault}' for fault in differing(ends[0][part], ends[1][part])]
    load = f'{folder}/whole/epoch_1.pth'
    elsewhere = runner_of(f'{folder}/other', other, 1, load_from=load, resume=True)
    elsewhere.train()
    elsewhere.save_checkpoint(f'{folder}/other', 'again.pth')
    dist.barrier()
    found = torch.load(f'{folder}/other/again.pth', weights_only=True)
    for part in ('state_dict', 'ema_state_dict'):
        faults += [f'at stage {other}, {part}: {fault}' for fault in differing(found[part], same[part])]
    return faults + seen_in_test(folder, stage, load, same['state_dict'])


class Sees(Hook):
    """Keeps the weights with which something is tested, whole, on rank 0."""

    priority = 'LOWEST'

    def __init__(self) -> None:
        self.seen: dict[str, torch.Tensor] = {}

    def before_test_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self.seen = runner.sharded.engine.model_state()


class OneView(BaseTTAModel):
    """Test-time augmentation around a model; its data are given as one view."""

    def test_step(self, data: Any) -> list:
        return self.module.test_step(data)

    def merge_preds(self, data_samples_list: list) -> list:
        return data_samples_list


def seen_in_test(folder: str, stage: int, load: str, averaged: dict[str, torch.Tensor]) -> list[str]:
    """What is tested has the averaged weights, with the hook and without, and with test-time augmentation around."""
    faults = []
    for hooks, around in (([dict(HOOK)], None), ([], None), ([dict(HOOK)], OneView)):
        runner = runner_of(f'{folder}/tested', stage, 1, load_from=load, custom_hooks=hooks, around=around)
        sees = Sees()
        runner.register_hook(sees)
        runner.test()
        if dist.get_rank() == 0:
            faults += differing(sees.seen, averaged)
    return faults


def runs(folder: str, stages: tuple[tuple[int, int], ...]) -> Faults:
    return {f'stages {a}, {b}': through_the_runner(f'{folder}/{a}{b}', a, b) for a, b in stages}


@pytest.mark.parametrize(
    'ranks, stages', [(2, ((3, 0), (0, 3))), pytest.param(2, ((1, 2), (2, 3), (3, 1)), marks=pytest.mark.slow)]
)
def test_save_resume_and_test(tmp_path: Path, ranks: int, stages: tuple) -> None:
    for case, faults in merged(run_ranks(ranks, runs, str(tmp_path), stages)).items():
        assert not faults, f'{case}: {faults}'
