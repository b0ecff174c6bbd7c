"""Parameters that a unit does not take as they are: of several dtypes, tiny ones, 0-dim ones."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.model import BaseModel
from torch import nn
from torch.distributed.tensor import DTensor

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from tests.distributed.cases import Faults, differing, merged
from tests.distributed.parity import BOUNDS, sgd
from tests.distributed.ranks import run_ranks
from tests.distributed.training import compare, full, train
from tests.models import toy_batch

pytestmark = pytest.mark.distributed


class Cast(nn.Module):
    """A layer that computes in the dtype of its weight."""

    def __init__(self, dtype: torch.dtype, bias: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 12).mul(0.3).to(dtype))
        self.bias = nn.Parameter(torch.randn(12).mul(0.1).to(bias or dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.to(self.weight.dtype), self.weight).to(x.dtype) + self.bias.to(x.dtype)


class Odd(nn.Module):
    """The unit; its scalar is bf16, most of it is not."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.wide, self.wider = Cast(torch.float32), Cast(torch.float32)
        self.narrow = Cast(torch.bfloat16, torch.float32 if way == 'one module' else None)
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.bfloat16))
        if way == 'frozen':
            self.narrow.requires_grad_(False)
        if way == 'frozen in float32':
            self.wide.requires_grad_(False)
            self.wider.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.wider(self.narrow(self.wide(x)))) * self.scale.float()


class Mixed(BaseModel):
    """Units of several dtypes, and a root of several."""

    def __init__(self, way: str = '') -> None:
        super().__init__()
        self.stem = Cast(torch.bfloat16)
        self.parts = nn.Sequential(Odd(way), Odd(way))
        self.head = nn.Linear(12, 7)

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        logits = self.head(self.parts(self.stem(inputs)))
        return dict(loss=nn.functional.cross_entropy(logits, labels)) if mode == 'loss' else logits


ODD = dict(type='ModuleClassPolicy', classes=['Odd'])
CLIPS = (dict(max_norm=0.05), dict(max_norm=0.05, norm_type='inf'), dict(type='value', clip_value=0.01))
WAYS = ('', 'one module', 'frozen', 'frozen in float32')


def beyond(found: dict, reference: dict, bounds: dict[str, float]) -> list[str]:
    return [f'{what}: {value:.1e}' for what, value in compare(found, reference).items() if not value <= bounds[what]]


# Gradients of bf16 parameters are rounded to bf16, by DDP before they are averaged, here after.
HALF = dict(loss=2e-3, norm=4e-3, grad=6e-3, update=8e-3, tensor=8e-2)


def dtypes() -> Faults:
    found: Faults = {}
    for way in WAYS:
        for stage in (1, 3):
            build = lambda way=way: Mixed(way)  # noqa: E731
            optim = dict(clip_grad=CLIPS[0], accumulative_counts=2)
            reference = train(build, toy_batch, sgd, {}, optim, 4)
            mine = train(build, toy_batch, sgd, dict(stage=stage, wrap_policy=ODD), optim, 4)
            found[f'{way or "trained"} {stage}'] = beyond(mine, reference, HALF)
    return found


def kept_whole() -> list[str]:
    """What is replicated is what the plan says, and why; the rest is sharded."""
    model = ZeroModelWrapper(module=Mixed('one module'), wrap_policy=ODD)
    said = {name: why for unit in model.plan.units for name, why in unit.whole}
    wanted = {'stem.weight': 'is bfloat16 in a unit that trains bfloat16'}
    wanted = {f'parts.{i}.narrow.weight': 'is bfloat16 in a unit that trains float32' for i in (0, 1)}
    wanted |= {f'parts.{i}.scale': 'is 0-dim, which FSDP2 cannot split' for i in (0, 1)}
    # The root has 156 elements in bf16 and 91 in float32.
    wanted |= {f'head.{name}': 'is float32 in a unit that trains bfloat16' for name in ('weight', 'bias')}
    plain = {name for name, param in model.module.named_parameters() if not isinstance(param, DTensor)}
    return ([] if said == wanted else [str(said)]) + ([] if plain == wanted.keys() else [str(plain)])


def loaded() -> list[str]:
    """Saved and loaded to the bit, optimizer too; frozen parameters have neither gradient nor state."""
    states, wholes, losses = [], [], []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = ZeroModelWrapper(module=Mixed('frozen'), wrap_policy=ODD)
        optim = ZeroOptimWrapper(torch.optim.AdamW(model.parameters(), lr=1e-2), clip_grad=dict(max_norm=1.0))
        optim.initialize_count_status(model, 0, 100)
        if seed == 0:
            model.train_step(toy_batch(dist.get_rank()), optim)
            states = [model.engine.model_state(), optim.state_dict()]
            frozen = [param for param in model.parameters() if not param.requires_grad]
            idle = all(param.grad is None and not optim.optimizer.state.get(param) for param in frozen)
        else:
            model.engine.load_model_state(states[0])
            optim.load_state_dict(states[1])
        wholes.append({name: full(param) for name, param in model.module.named_parameters()})
        losses.append(float(model.train_step(toy_batch(5 + dist.get_rank()), optim)['loss'].detach()))
    return (
        differing(*wholes) + ([] if losses[0] == losses[1] else [f'{losses}']) + ([] if idle else ['frozen has state'])
    )


class Small(nn.Module):
    """Parameters with fewer rows, and fewer elements, than there are ranks."""

    def __init__(self, empty: bool) -> None:
        super().__init__()
        shapes = [(1,), (3,), (1, 1, 1), (2, 2), (1, 12), (12, 1), *([(0, 5)] if empty else [])]
        self.tiny = nn.ParameterList(nn.Parameter(torch.randn(shape) * 0.5) for shape in shapes)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, three, ones, four, row, column, *none = self.tiny
        x = x * one + three.sum() + ones.squeeze() * x + four.prod() + row
        return torch.tanh(x * column.T * self.scale) + sum(param.sum() for param in none)


class Tiny(BaseModel):
    """A model of such units."""

    def __init__(self, empty: bool) -> None:
        super().__init__()
        self.parts = nn.Sequential(Small(empty), Small(empty))
        self.bias = nn.Parameter(torch.zeros(1))
        self.head = nn.Linear(12, 7)

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        logits = self.head(self.parts(inputs) + self.bias)
        return dict(loss=nn.functional.cross_entropy(logits, labels)) if mode == 'loss' else logits


def tiny() -> Faults:
    policies = (dict(type='ModuleClassPolicy', classes=['Small']), None)
    found: Faults = {}
    for clip in (None, *CLIPS):
        optim = dict(accumulative_counts=2, **({} if clip is None else dict(clip_grad=clip)))
        # Stock clipping has no largest element of nothing.
        build = functools.partial(Tiny, clip != CLIPS[1])
        reference = train(build, toy_batch, sgd, {}, optim, 3)
        faults = []
        for stage, policy in ((3, policies[0]), (3, None), (2, policies[0])):
            mine = train(build, toy_batch, sgd, dict(stage=stage, wrap_policy=policy), optim, 3)
            faults += [f'stage {stage}: {fault}' for fault in beyond(mine, reference, BOUNDS)]
        found[f'tiny, clipped by {clip}'] = faults
    return found


class Branch(nn.Module):
    """A unit whose parameters not every rank uses: shards, one that is 0-dim, and one of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.some, self.none = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.scale, self.idle = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor(0.7))
        self.narrow, self.lazy = (nn.Parameter(torch.full((3,), 0.3, dtype=torch.bfloat16)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.all(x))
        if dist.get_rank() == 0:
            x = x + torch.tanh(self.some(x)) * self.scale + self.narrow.sum().float()
        return x


class Branched(BaseModel):
    """A model of such units."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.head = nn.Sequential(Branch(), Branch()), nn.Linear(12, 7)

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        logits = self.head(self.parts(inputs))
        return dict(loss=nn.functional.cross_entropy(logits, labels)) if mode == 'loss' else logits


def unused() -> Faults:
    """Used on one rank: averaged as if the others' gradients were zero. On none: not moved by decay or momentum."""
    found: Faults = {}
    optim = dict(clip_grad=CLIPS[0], accumulative_counts=2)
    reference = train(Branched, toy_batch, sgd, {}, optim, 4)
    policy = dict(type='ModuleClassPolicy', classes=['Branch'])
    for stage, units in ((3, policy), (3, None), (1, policy)):
        fields = dict(stage=stage, wrap_policy=units, find_unused_parameters=True)
        mine = train(Branched, toy_batch, sgd, fields, optim, 4)
        moved = [name for name, value in mine['after'].items() if not torch.equal(value, mine['before'][name])]
        idle = [name for name in moved if any(part in name for part in ('none', 'idle', 'lazy'))]
        found[f'unused, stage {stage}, {units}'] = [*beyond(mine, reference, HALF), *(f'{name} moved' for name in idle)]
    return found


def run_cases() -> Faults:
    return {**tiny(), **dtypes(), **unused(), 'kept whole': kept_whole(), 'loaded': loaded()}


@pytest.mark.parametrize('ranks', [2, pytest.param(4, marks=pytest.mark.slow)])
def test_odd_parameters(ranks: int) -> None:
    for case, faults in merged(run_ranks(ranks, run_cases)).items():
        assert not faults, f'{case}: {faults}'
