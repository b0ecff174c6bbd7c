"""A model that has what recomputing a module gets wrong, and its training with regions and without."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from mmengine.model import BaseModel
from torch import Tensor, nn

from tests.distributed.cases import Faults
from tests.distributed.parity import sgd
from tests.distributed.training import Record, train
from tests.models import toy_batch


class Block(nn.Module):
    """Running statistics, dropout, all kinds of arguments and results, and parameters that are used on some ranks."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.3)
        self.sometimes, self.never = nn.Linear(width, width), nn.Linear(3, 3)

    def forward(self, x: Tensor, extras: tuple, *, shift: Any = 0.0, names: Any = ()) -> dict:
        offset, (kind, more) = extras
        assert kind == 'kind' and names == ['a', {'b': 2}]
        hidden = self.drop(self.act(self.up(self.norm(x) + offset)))
        out = x + self.down(hidden) * more['scale'] + shift
        if more['on'] is None or dist.get_rank() in more['on']:
            out = out + self.sometimes(x)
        return dict(out=(out, None), hidden=[hidden.mean()], names=names)


class Stage(nn.Module):
    """Holds blocks, and has a parameter of its own."""

    def __init__(self, depth: int, on: tuple | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.offset, self.norm, self.on = nn.Parameter(torch.ones(12)), nn.LayerNorm(12), on

    def forward(self, x: Tensor, /, *, scale: Any = 1.0) -> tuple[Tensor, list[Tensor]]:
        means = []
        for index, block in enumerate(self.blocks):
            extras = self.offset, ('kind', dict(scale=scale, on=self.on))
            shift = self.offset if index else 0.5
            found = block(x, extras, shift=shift, names=['a', {'b': 2}])
            x, means = found['out'][0], means + found['hidden']
        return self.norm(x), means


class Regions(BaseModel):
    """Stages: one that gets what needs no gradient, one frozen in part, one that runs twice, one frozen altogether."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Stage(1), Stage(2, on=(0,)), Stage(1, on=()), Stage(1)])
        self.prelude, self.head = Stage(1), nn.Linear(12, 7)
        self.prelude.requires_grad_(False)
        self.stages[1].blocks[0].requires_grad_(False)
        self.stages[3].requires_grad_(False)

    def forward(self, inputs: Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        x, losses = self.prelude(inputs)[0] + inputs, []
        for stage in (self.stages[0], self.stages[1], self.stages[2], self.stages[3], self.stages[2]):
            x, means = stage(x, scale=torch.full((12,), 0.5))
            losses += means
        logits = self.head(x).float()
        if mode != 'loss':
            return logits
        return dict(loss=nn.functional.cross_entropy(logits, labels), loss_mean=torch.stack(losses).sum())


UNITS: dict[str, list[str] | None] = {
    'root': None,
    'stages': ['Stage'],
    'blocks': ['Block'],
    'both': ['Stage', 'Block'],
}
DTYPES = ('', 'bfloat16', 'float16')
LAYERS = ('up', 'down', 'norm', 'sometimes')
REGIONS: dict[str, Callable[[str, nn.Module], bool]] = {
    'stages': lambda _, module: isinstance(module, Stage),
    'blocks': lambda _, module: isinstance(module, Block),
    'nested': lambda name, module: isinstance(module, (Stage, Block)) or name.endswith('up'),
    'layers': lambda name, module: name.endswith(LAYERS) and '.blocks.' in name,
}


@dataclass(frozen=True)
class Plan:
    """One training.

    Args:
        stage (int): Of ZeRO.
        units (str): A key of UNITS.
        regions (str): A key of REGIONS, or '' for none.
        save (str): As the config's.
        early_stop (bool): As the config's.
        dtype (str): Of the optimizer wrapper; '' is float32.
    """

    stage: int
    units: str
    regions: str = ''
    save: str = 'inputs'
    early_stop: bool = True
    dtype: str = ''

    def train(self) -> Record:
        """A step of two micro-batches and one of a single one."""
        policy = UNITS[self.units] and dict(type='ModuleClassPolicy', classes=UNITS[self.units])
        fields: dict[str, Any] = dict(stage=self.stage, wrap_policy=policy, find_unused_parameters=True)
        optim: dict[str, Any] = dict(accumulative_counts=2, clip_grad=dict(max_norm=1.0))
        if self.dtype:
            optim['dtype'] = self.dtype
            fields['precision'] = dict(param_dtype=self.dtype) if self.stage else {}
        if self.dtype == 'float16':
            optim['loss_scale'] = dict(init_scale=2.0**10)
        fields['activation_checkpointing'] = self._checkpointing()
        return train(Regions, toy_batch, sgd, fields, optim, steps=3)

    def _checkpointing(self) -> Any:
        if not self.regions:
            return []
        chosen = REGIONS[self.regions]
        with torch.device('meta'):
            modules = [name for name, module in Regions().named_modules() if chosen(name, module)]
        offload = 'cpu' if self.save == 'all' else None
        return dict(modules=modules, save=self.save, early_stop=self.early_stop, offload=offload)


def all_plans() -> list[Plan]:
    """The whole product; DDP knows no units, and what recomputes nothing does not stop early."""
    choices = itertools.product(range(4), UNITS, REGIONS, ('inputs', 'matmuls', 'all'), (True, False), DTYPES)
    plans = [Plan(*choice) for choice in choices]
    return [
        plan
        for plan in plans
        if (plan.stage or plan.units == 'root') and (plan.save != 'all' or plan.early_stop == Plan.early_stop)
    ]


def on_rank(plans: list[Plan]) -> Faults:
    """What differs by a bit between a training with regions and the same without."""
    faults: Faults = {}
    plain: dict[Plan, Record] = {}
    for plan in sorted(plans, key=lambda plan: (plan.stage, plan.units, plan.dtype)):
        bare = Plan(plan.stage, plan.units, dtype=plan.dtype)
        if bare not in plain:
            plain = {bare: bare.train()}
        try:
            faults[str(plan)] = [*differences(plan.train(), plain[bare])]
        except Exception as error:
            raise RuntimeError(str(plan)) from error
    return faults


def differences(found: Record, wanted: Record) -> Iterator[str]:
    """What of two records differs by a bit."""
    for key in ('losses', 'norms'):
        if found[key] != wanted[key]:
            yield f'{key}: {found[key]} instead of {wanted[key]}'
    for key in ('grads', 'buffers', 'after'):
        for name, value in wanted[key].items():
            other = found[key][name]
            if (value is None) != (other is None) or value is not None and not torch.equal(value, other):
                yield f'{key}: {name}'
