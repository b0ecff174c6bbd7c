"""Rank 0's parameters and buffers on every rank at every stage, and no more memory than the way needs."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from mmengine.registry import MODELS
from torch import nn

from mmzero import ZeroModelWrapper
from mmzero.engines.ddp import DDPEngine
from mmzero.engines.fsdp2.unit_rules import UnitSharding
from mmzero.errors import PlanError
from tests.distributed.cases import Faults, live_bytes, merged, only_new_objects, refused, same_on_all_ranks
from tests.distributed.detector import seeded, tensors_of
from tests.distributed.ranks import run_ranks
from tests.models import Block, ToyModel
from tests.vectors import vector_runner

pytestmark = pytest.mark.distributed

STAGES = (0, 1, 2, 3)
BLOCKS = dict(type='ModuleClassPolicy', classes=['Block'])
NORMALIZE = dict(type='ImgDataPreprocessor', mean=[0.5, 0.25, 0.125], std=[1.0, 2.0, 4.0])
DTYPES = ('bool', 'uint8', 'int8', 'int16', 'int64', 'float16', 'bfloat16', 'float64', 'complex64', 'float8_e4m3fn')


class Buffers(ToyModel):
    """Has buffers of every kind; those drawn here differ from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        self.data_preprocessor = MODELS.build(NORMALIZE)
        for dtype in DTYPES:
            self.register_buffer(f'of_{dtype}', (torch.rand(5) * 3).to(getattr(torch, dtype)), persistent=dtype < 'f')
        self.register_buffer('zero_dim', torch.rand(()), persistent=False)
        self.register_buffer('empty', torch.rand(0, 3), persistent=False)
        self.register_buffer('none', None)
        self.register_buffer('strided', torch.rand(4, 6).t(), persistent=False)
        self.register_buffer('expanded', torch.rand(1, 3).expand(4, 3), persistent=False)
        # Computed from a parameter, which is on meta on ranks other than 0.
        self.register_buffer('of_weights', self.stem.weight.detach().sum(0), persistent=False)
        # Swin's way to spread its rates.
        rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        self.register_buffer('rates', torch.tensor(rates) * torch.rand(()), persistent=False)
        self.blocks[1].register_buffer('shared', self.of_weights, persistent=False)
        self.register_buffer('changed', torch.zeros(3), persistent=False)
        self.inner = nn.BatchNorm1d(12)
        self.inner.running_mean.normal_()

    def init_weights(self) -> None:
        self.changed.normal_()


def buffers(stage: int, folder: str) -> list[str]:
    """Built from a config by the runner, and given as a model to the pair."""
    runner = vector_of(folder, stage, dict(type=Buffers))
    runner.prepare()
    torch.manual_seed(dist.get_rank())
    pair = ZeroModelWrapper(module=Buffers(), stage=stage, wrap_policy=BLOCKS)
    faults = []
    for model in (runner.model.module, pair.module):
        found = dict(model.named_buffers(remove_duplicate=False))
        faults += same_on_all_ranks({name: value.clone() for name, value in found.items()})
        faults += [f'{name} is on meta' for name, value in found.items() if value.is_meta]
        faults += [] if model.blocks[1].shared is model.of_weights else ['a shared buffer is two']
        faults += [] if found['strided'].shape == (6, 4) and len(found) >= len(DTYPES) + 8 else ['some are lost']
    mean = runner.model.module.data_preprocessor.mean.flatten().tolist()
    return faults + ([] if mean == [0.5, 0.25, 0.125] and runner.model.module.changed.any() else ['values are lost'])


def vector_of(folder: str, stage: int, model: dict, **changes: Any) -> Any:
    randomness = dict(seed=0, diff_rank_seed=True)
    return vector_runner(
        f'{folder}/work', model, stage, dict(wrap_policy=BLOCKS), launcher='pytorch', randomness=randomness, **changes
    )


def seeds(stage: int, folder: str, **fields: Any) -> list[str]:
    """Rank 0's random weights win, to the bit, whoever built what; by the pair and by the runner."""
    net = seeded(ToyModel, 7 * dist.get_rank())
    given = {name: value.clone() for name, value in tensors_of(net).items()}
    pair = ZeroModelWrapper(module=net, stage=stage, wrap_policy=BLOCKS, **fields)
    faults = same_on_all_ranks(tensors_of(pair.module), given)
    runner = vector_of(folder, stage, dict(type=ToyModel))
    faults += [] if dist.get_rank() or not any(p.is_meta for p in runner.model.parameters()) else ['rank 0 is on meta']
    given = tensors_of(runner.model) if dist.get_rank() == 0 else {}
    runner.prepare()
    return faults + same_on_all_ranks(tensors_of(runner.model.module), given)


class Holds(ToyModel):
    """Keeps tensors that are no buffers, computed from a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.bound = self.stem.weight.detach().abs().max()
        self.rows = [self.stem.weight.detach()[0]]

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        return super().forward(inputs * self.bound.clamp(1, 1) + 0 * self.rows[0], labels, mode)


def attributes(stage: int, folder: str) -> list[str]:
    """Such a model is built for real, since nothing would fill those."""
    runner = vector_runner(
        f'{folder}/work', dict(type=Holds), stage, dict(find_unused_parameters=True), launcher='pytorch'
    )
    runner.train()
    model = runner.model.module
    return ['an attribute is on meta'] if model.bound.is_meta or model.rows[0].is_meta else []


class FreezesLate(ToyModel):
    """Freezes a part in init_weights, and makes a buffer in the first forward, of its own data."""

    def init_weights(self) -> None:
        self.stem.requires_grad_(False)

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        if not hasattr(self, 'seen'):
            self.register_buffer('seen', inputs.mean(0))
        return super().forward(inputs, labels, mode)


def late(stage: int, folder: str) -> list[str]:
    """Rank 0's flags hold everywhere, and its buffer is what is saved and loaded again."""
    runner = vector_runner(
        f'{folder}/late', dict(type=FreezesLate), stage, dict(find_unused_parameters=True), launcher='pytorch'
    )
    runner.train()
    model = runner.model.module
    faults = ['not frozen'] if any(param.requires_grad for param in model.stem.parameters()) else []
    saved = torch.load(f'{folder}/late/epoch_1.pth', weights_only=True)['state_dict']
    if (dist.get_rank() == 0) != torch.equal(saved['seen'], model.seen):
        faults.append("the saved buffer is not rank 0's")
    runner.load_checkpoint(f'{folder}/late/epoch_1.pth', strict=True)
    return faults + ([] if torch.equal(saved['seen'], model.seen) else ['the buffer is not loaded'])


def another_model(stage: int, folder: str) -> list[str]:
    """Ranks that build other models are named, on every rank."""
    faults: list[str] = []
    rank = dist.get_rank()
    for build in (lambda: ToyModel(depth=2 + rank), lambda: ToyModel(width=12 + 2 * rank)):
        with refused(faults, PlanError, 'rank 1 built another model than rank 0'):
            ZeroModelWrapper(module=build(), stage=stage)
    return faults


WIDTH, DEPTH = 96, 4


def memory(stage: int, folder: str) -> list[str]:
    """Before sharding the model is on rank 0 alone; while sharding, a unit more than shards on the others."""
    wide = functools.partial(ToyModel, WIDTH, DEPTH)
    whole = sum(param.numel() * 4 for param in wide().parameters())
    with only_new_objects():
        with peak_of(Block, '__init__') as building:
            runner = vector_of(folder, stage, dict(type=ToyModel, width=WIDTH, depth=DEPTH))
        built = live_bytes()
        with peak_of(*((DDPEngine, '_replicate') if stage == 0 else (UnitSharding, 'shard'))) as sharding:
            runner.prepare()
        after = live_bytes()
    kept = whole if stage == 0 else whole / 2
    bounds = dict(built=1.02 * whole, building=whole * 1.3, sharding=whole * 1.3, after=kept * 1.05)
    if dist.get_rank() > 0:
        # What is no parameter; then a unit, of which there are DEPTH, and what is kept.
        bounds |= dict(built=0.02 * whole, building=0.02 * whole, sharding=min(kept + 0.3 * whole, 1.05 * whole))
    found = dict(built=built, building=building[0], sharding=sharding[0], after=after)
    return [f'{name}: {found[name] / whole:.2f} of the model' for name in bounds if found[name] > bounds[name]]


@contextmanager
def peak_of(owner: Any, name: str) -> Iterator[list[int]]:
    """The most bytes that are alive whenever something is called."""
    peak, call = [0], getattr(owner, name)

    def noting(*args: Any, **kwargs: Any) -> Any:
        peak[0] = max(peak[0], live_bytes())
        return call(*args, **kwargs)

    with patch.object(owner, name, noting):
        yield peak


CASES = (buffers, seeds, attributes, late, another_model, memory)


def run_cases(folder: str) -> Faults:
    return {f'{case.__name__} {stage}': case(stage, folder) for case in CASES for stage in STAGES}


@pytest.fixture(scope='module')
def found(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return merged(run_ranks(2, run_cases, str(tmp_path_factory.mktemp('same'))))


@pytest.mark.parametrize('stage', STAGES)
@pytest.mark.parametrize('case', [case.__name__ for case in CASES])
def test_same_everywhere(found: Faults, case: str, stage: int) -> None:
    assert not found[f'{case} {stage}'], '\n'.join(found[f'{case} {stage}'])


def on_a_mesh(folder: str) -> Faults:
    mesh = dict(mesh=dict(replicate=2))
    return {f'seeds {stage}': seeds(stage, folder, **mesh) for stage in (1, 2, 3)}


@pytest.mark.slow
def test_replicas_start_from_rank_0(tmp_path_factory: pytest.TempPathFactory) -> None:
    for case, faults in merged(run_ranks(4, on_a_mesh, str(tmp_path_factory.mktemp('mesh')))).items():
        assert not faults, (case, faults)
