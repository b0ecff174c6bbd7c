"""Running statistics in val and in checkpoints: those that MMEngine's Runner has under DDP, rank by rank."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from mmengine.hooks import Hook
from mmengine.model import BaseModel, MMSeparateDistributedDataParallel
from mmengine.runner import Runner
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mmzero import ZeroModelWrapper, ZeroOptimWrapper, ZeroRunner
from mmzero._compat import ddp_buffer_arguments
from mmzero.analysis.collectives import CollectiveLog
from mmzero.errors import ConfigError
from tests.distributed.cases import Faults, merged, refused
from tests.distributed.gan import Gan, build_gan_pair, gan_batch, train_gan
from tests.distributed.ranks import run_ranks
from tests.distributed.test_two_optimizers import OneNetwork, split
from tests.models import toy_batch
from tests.vectors import Count, Vectors, loader

pytestmark = pytest.mark.distributed

STAGES = (0, 1, 2, 3)
SYNC_NORM = dict(type='mmdet.SyncNormHook', priority=48)
EMA = dict(type='EMAHook', ema_type='ExponentialMovingAverage', momentum=0.1, update_buffers=True, priority=49)
BY_ITER = dict(train_cfg=dict(by_epoch=False, max_iters=6, val_interval=3))
OF_CHECKPOINT = dict(default_hooks=dict(checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=6)))
ACCUMULATING = dict(optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1), accumulative_counts=3))
_numbers = itertools.count()

# What the config asks for: arguments of the runner, of the wrapper, and whether ranks have the same statistics in val.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    'nothing': ({}, {}, False),
    'SyncBuffersHook': (dict(custom_hooks=[dict(type='SyncBuffersHook')]), {}, True),
    'SyncBuffersHook, by iterations': (
        dict(custom_hooks=[dict(type='SyncBuffersHook')], **BY_ITER, **OF_CHECKPOINT),
        {},
        True,
    ),
    'SyncBuffersHook and averages of buffers': (dict(custom_hooks=[dict(type='SyncBuffersHook'), EMA]), {}, False),
    'SyncNormHook': (dict(custom_hooks=[SYNC_NORM]), {}, True),
    'SyncNormHook and averages of buffers': (dict(custom_hooks=[SYNC_NORM, EMA]), {}, False),
    'broadcast_buffers': ({}, dict(broadcast_buffers=True), False),
    'broadcast_buffers, several micro-batches': (ACCUMULATING, dict(broadcast_buffers=True), False),
    'broadcast_buffers and SyncNormHook': (dict(custom_hooks=[SYNC_NORM]), dict(broadcast_buffers=True), True),
}


class NormedBlock(nn.Module):
    """A unit with a batch norm inside."""

    def __init__(self, **norm: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)
        self.norm = nn.BatchNorm1d(12, **norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.layer(x)))


class Normed(BaseModel):
    """Batch norms in units and outside of them, with weights and without, and a buffer that is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12, affine=False)
        self.blocks = nn.ModuleList([NormedBlock(), NormedBlock(momentum=None)])
        self.head = nn.Linear(12, 7)
        self.register_buffer('seen', torch.zeros((), dtype=torch.float64), persistent=False)

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        if self.training:
            self.seen += inputs.double().sum().abs()
        x = self.norm(inputs)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return dict(loss=nn.functional.cross_entropy(logits, labels)) if mode == 'loss' else list(logits)


class Sees(Hook):
    """Keeps the buffers that each val has, on this rank."""

    priority = 'LOWEST'

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def before_val_epoch(self, runner: Any) -> None:
        self.seen.append({name: buffer.clone() for name, buffer in runner.model.module.named_buffers()})


def trained(folder: str, runner: type, wrapper: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Train, and keep what val had and what was saved."""
    settings: dict[str, Any] = dict(
        # A batch norm over two samples has no more than their signs left.
        train_dataloader=dict(loader(Vectors(16 * dist.get_world_size())), batch_size=4),
        val_dataloader=loader(),
        train_cfg=dict(by_epoch=True, max_epochs=2, val_interval=1),
        val_cfg=dict(),
        val_evaluator=dict(type=Count),
        optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1)),
        randomness=dict(seed=0),
        launcher='pytorch',
        log_level='ERROR',
        experiment_name=f'buffers {next(_numbers)}',
    )
    torch.manual_seed(0)
    built = runner(model=Normed(), work_dir=folder, **{**settings, **changes, 'cfg': dict(model_wrapper_cfg=wrapper)})
    sees = Sees()
    built.register_hook(sees)
    built.train()
    dist.barrier()
    saved = {}
    if dist.get_rank() == 0:
        (path,) = Path(folder).glob('*_[26].pth')
        # MMEngine's own hold more than tensors.
        saved = torch.load(path, weights_only=False)
    return dict(seen=sees.seen, saved={part: saved[part] for part in ('state_dict', 'ema_state_dict') if part in saved})


def wrapper_of_ddp(**fields: Any) -> dict[str, Any]:
    return dict(type='MMDistributedDataParallel', device_ids=None, **dict(dict(broadcast_buffers=False), **fields))


def wrapper_of(stage: int, **fields: Any) -> dict[str, Any]:
    policy = dict(type='ModuleClassPolicy', classes=['NormedBlock'])
    return dict(type='ZeroModelWrapper', stage=stage, wrap_policy=policy, **fields)


def apart(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is missing or another value; integers to the bit."""
    faults = [f'{name} is on one side only' for name in found.keys() ^ wanted.keys()]
    for name in found.keys() & wanted.keys():
        distance = float((found[name] - wanted[name]).double().norm())
        allowed = 1e-5 * float(wanted[name].double().norm()) if wanted[name].is_floating_point() else 0
        if found[name].dtype != wanted[name].dtype or not distance <= allowed:
            faults.append(f'{name} is {distance:.0e} off')
    return faults


def compare(found: dict[str, Any], wanted: dict[str, Any], are_same: bool) -> list[str]:
    faults = [] if len(found['seen']) == len(wanted['seen']) == 2 else ['val did not come twice']
    for number, (own, theirs) in enumerate(zip(found['seen'], wanted['seen'], strict=False)):
        faults += [f'val {number}: {name}' for name in apart(own, theirs)]
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, {name: value.tolist() for name, value in own.items() if 'running' in name})
        if all(other == everyones[0] for other in everyones) != are_same:
            faults.append(f'val {number}: statistics of ranks {"differ" if are_same else "are the same"}')
    if found['saved'].keys() != wanted['saved'].keys():
        return [*faults, f'the checkpoint has {list(found["saved"])}, not {list(wanted["saved"])}']
    for part, state in wanted['saved'].items():
        faults += [f'{part} of the checkpoint: {name}' for name in apart(found['saved'][part], state)]
    return faults


def statistics(folder: str, stages: tuple[int, ...]) -> Faults:
    found: Faults = {}
    for number, (name, (changes, fields, are_same)) in enumerate(SETTINGS.items()):
        wanted = trained(f'{folder}/{number}', Runner, wrapper_of_ddp(**fields), changes)
        for stage in stages:
            own = trained(f'{folder}/{number}_{stage}', ZeroRunner, wrapper_of(stage, **fields), changes)
            found[f'{name}, {stage}'] = compare(own, wanted, are_same)
    return found


@pytest.mark.parametrize('stages', [(0, 3), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_statistics_are_those_of_ddp(tmp_path: Path, stages: tuple[int, ...]) -> None:
    for case, faults in merged(run_ranks(2, statistics, str(tmp_path), stages)).items():
        assert not faults, f'{case}: {faults}'


def by_hand(build: Any) -> dict[str, torch.Tensor]:
    """Two forwards before a backward, of which each has other buffers; then one without gradients."""
    torch.manual_seed(0)
    net = Normed()
    model = build(net)
    for step in range(3):
        rank = dist.get_rank()
        losses = [model(**toy_batch(10 * step + 2 * rank + i), mode='loss')['loss'] for i in range(2)]
        sum(losses).backward()
    with torch.no_grad():
        model(**toy_batch(50 + rank), mode='loss')
        model(**toy_batch(60 + rank), mode='loss')
    return {name: buffer.clone() for name, buffer in net.named_buffers()}


def forwards_by_hand() -> list[str]:
    faults = []
    for broadcast in (False, True):
        wanted = by_hand(lambda net, flag=broadcast: DistributedDataParallel(net, **ddp_buffer_arguments(flag)))
        for stage in STAGES:
            fields = dict(wrapper_of(stage, broadcast_buffers=broadcast))
            del fields['type']
            found = by_hand(lambda net, fields=fields: ZeroModelWrapper(module=net, **fields))
            faults += [f'{broadcast}, stage {stage}: {name}' for name in apart(found, wanted)]
    return faults


def what_it_costs() -> list[str]:
    """One broadcast per dtype and optimizer step."""
    counts = {}
    for broadcast in (False, True):
        fields = dict(wrapper_of(3, broadcast_buffers=broadcast))
        del fields['type']
        model = ZeroModelWrapper(module=Normed(), **fields)
        optim = ZeroOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), accumulative_counts=2)
        optim.initialize_count_status(model, 0, 4)
        for step in range(4):
            with CollectiveLog() as log:
                model.train_step(toy_batch(step), optim)
            counts[broadcast, step] = [(call.kind, call.elements) for call in log.calls if call.kind == 'broadcast']
    # Means and variances, numbers of batches, and the one of the model's own.
    wanted = sorted(('broadcast', elements) for elements in (6 * 12, 3, 1))
    faults = [f'without: {counts[False, step]}' for step in range(4) if counts[False, step]]
    faults += [f'step {step}: {counts[True, step]}' for step in (0, 2) if sorted(counts[True, step]) != wanted]
    return faults + [f'micro-batch {step}: {counts[True, step]}' for step in (1, 3) if counts[True, step]]


def uneven() -> list[str]:
    """Where one rank has no more batches, and a copy of its first stands in, as at stage 0."""
    faults = []
    for counts in ([3, 1, 2, 2], [1, 3, 2, 2]):
        found = []
        for stage in (0, 3):
            fields = dict(wrapper_of(stage, broadcast_buffers=True))
            del fields['type']
            torch.manual_seed(0)
            model = ZeroModelWrapper(module=Normed(), **fields)
            optim = ZeroOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
            rank = dist.get_rank()
            for number in model.join(range(counts[rank])):
                model.train_step(toy_batch(10 * rank + number), optim)
            found.append({name: buffer.clone() for name, buffer in model.module.named_buffers()})
        faults += [f'{counts}: {name}' for name in apart(found[1], found[0])]
    return faults


class NormedGan(Gan):
    """Both networks have statistics; a bias before a norm has no gradient, and Adam would move it by noise."""

    seen: list[tuple[str, torch.Tensor]] = []

    def __init__(self) -> None:
        super().__init__(1, False)
        self.generator = nn.Sequential(nn.Linear(12, 12, False), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 12))
        self.discriminator = nn.Sequential(nn.Linear(12, 12, False), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 1))

    def train_step(self, data: dict, optim_wrapper: Any) -> dict[str, torch.Tensor]:
        found = super().train_step(data, optim_wrapper)
        self.seen += [(name.replace('.module.', '.'), buffer.clone()) for name, buffer in self.named_buffers()]
        return found


def seen_in_steps(fields: dict[str, Any], optim: dict[str, dict]) -> dict[str, torch.Tensor]:
    """All buffers after each step."""
    NormedGan.seen = []
    train_gan(NormedGan, fields, optim, 5)
    return {f'{number} {name}': value for number, (name, value) in enumerate(NormedGan.seen)}


def children() -> list[str]:
    """Those of each child, as MMSeparateDistributedDataParallel broadcasts them, also while one accumulates."""
    faults = []
    stock = partial(MMSeparateDistributedDataParallel, broadcast_buffers=True)
    for optim in ({}, dict(discriminator=dict(accumulative_counts=3)), dict(generator=dict(accumulative_counts=3))):
        with patch('tests.distributed.gan.MMSeparateDistributedDataParallel', stock):
            wanted = seen_in_steps({}, optim)
        for stage in (0, 3):
            fields = dict(stage=stage, wrap_policy=None)
            for broadcast in (True, False):
                off = apart(seen_in_steps(dict(fields, broadcast_buffers=broadcast), optim), wanted)
                faults += [f'{optim}, stage {stage}: {name}' for name in (off if broadcast else [])]
                if dist.get_rank() and not broadcast and not off:
                    faults.append(f'{optim}, stage {stage}: without it they are the same')
    return faults


class Doubling:
    """What a project puts around a hook of mmdet."""

    def before_val_epoch(self, runner: Any) -> None:
        super().before_val_epoch(runner)  # type: ignore[misc]
        for name, buffer in runner.model.module.named_buffers():
            if name.endswith('running_mean'):
                buffer.mul_(2)


def a_derived_hook(folder: str) -> list[str]:
    """Its own part runs, around what is averaged."""
    from mmdet.engine.hooks import SyncNormHook

    runs = []
    for runner, wrapper in ((Runner, wrapper_of_ddp()), (ZeroRunner, wrapper_of(3))):
        hook = type('Derived', (Doubling, SyncNormHook), {})()
        runs.append(trained(f'{folder}/{runner.__name__}', runner, wrapper, dict(custom_hooks=[hook])))
    return compare(runs[1], runs[0], True)


def refusals() -> list[str]:
    """One forward of the whole model is what it is about."""
    faults: list[str] = []
    for stage in (0, 3):
        model, optim = build_gan_pair(
            OneNetwork(), split, dict(stage=stage, separate=False, broadcast_buffers=True), {}
        )
        with refused(faults, ConfigError, 'model_wrapper_cfg.broadcast_buffers: is for one forward per step'):
            model.train_step(gan_batch(0), optim)
    return faults


def more(folder: str) -> Faults:
    return {
        'by hand': forwards_by_hand(),
        'what it costs': what_it_costs(),
        'uneven': uneven(),
        'children': children(),
        'derived': a_derived_hook(f'{folder}/derived'),
        'refusals': refusals(),
    }


def test_more(tmp_path: Path) -> None:
    for case, faults in merged(run_ranks(2, more, str(tmp_path))).items():
        assert not faults, f'{case}: {faults[:8]}'


@pytest.mark.slow
def test_on_four_ranks(tmp_path: Path) -> None:
    """Where rank 0's neighbours are replicas of it, too."""
    for case, faults in merged(run_ranks(4, statistics, str(tmp_path), (1, 3))).items():
        assert not faults, f'{case}: {faults[:8]}'
