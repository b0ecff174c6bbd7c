"""Units that are entered by methods other than forward train as under stock DDP."""

from typing import Any

import pytest
import torch
from mmengine.model import BaseModel
from torch import nn

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero.errors import PlanError
from mmzero.policies import ModuleClassPolicy, WrapPlan, with_methods
from tests.distributed.cases import Faults, merged
from tests.distributed.parity import BOUNDS, sgd
from tests.distributed.ranks import run_ranks
from tests.distributed.training import compare, train
from tests.models import toy_batch

pytestmark = pytest.mark.distributed


class Part(nn.Module):
    """The unit, with methods that use its parameters before, after and without its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.w = nn.Linear(12, 12), nn.Linear(12, 12), nn.Parameter(torch.randn(12) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.a(x)) + self.w

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.b(x)) * self.w + x

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return self(self.plain(x))

    def after(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.b(self(x))) * self.w + x

    def several(self, x: torch.Tensor) -> tuple[dict, torch.Tensor]:
        return dict(x=self.plain(self.plain(x))), x


class Calls(Part):
    """Its forward runs one of its methods, and goes on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.a(self.plain(x))) + self.w


METHODS = ('plain', 'before', 'after', 'several')


class Entered(BaseModel):
    """Enters its part in some ways, one after the other."""

    def __init__(self, steps: tuple[str, ...], part: type[Part] = Part) -> None:
        super().__init__()
        self.steps, self.stem, self.part, self.head = steps, nn.Linear(12, 12), part(), nn.Linear(12, 7)

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        # Inputs of the first unit need no gradient where there is no stem.
        x = inputs if self.steps[0] == 'inputs' else self.stem(inputs)
        for step in self.steps:
            if step == 'several':
                x = self.part.several(x)[0]['x']
            elif step != 'inputs':
                x = self.part(x) if step == 'forward' else getattr(self.part, step)(x)
        logits = self.head(x)
        if mode == 'predict':
            return list(logits)
        return dict(loss=nn.functional.cross_entropy(logits, labels)) if mode == 'loss' else logits


WAYS = [
    ('plain',),
    ('inputs', 'plain'),
    ('forward', 'plain'),
    ('plain', 'forward'),
    ('plain', 'plain'),
    ('forward', 'plain', 'forward'),
    ('before',),
    ('after',),
    ('inputs', 'after'),
    ('after', 'before', 'plain'),
    ('several', 'forward'),
]
RULES = [
    dict(stage=3),
    dict(stage=1),
    dict(stage=3, overrides=[dict(units='part', shard=False)]),
]


def policy(model: nn.Module) -> WrapPlan:
    """Parts as units, entered by all of their methods."""
    return with_methods(ModuleClassPolicy(['Part'])(model), {'part': METHODS})


def trained(steps: tuple[str, ...], part: type[Part], **fields: Any) -> list[str]:
    build = lambda: Entered(steps, part)  # noqa: E731
    optim = dict(accumulative_counts=2, clip_grad=dict(max_norm=0.1))
    reference = train(build, toy_batch, sgd, {}, optim, 3)
    fields = dict(wrap_policy=policy, find_unused_parameters=True, **fields)
    off = compare(train(build, toy_batch, sgd, fields, optim, 3), reference)
    return [f'{fields}: {what} {value:.1e}' for what, value in off.items() if not value <= BOUNDS[what]]


def run_cases() -> Faults:
    found: Faults = {}
    for steps in WAYS:
        found[' '.join(steps)] = [fault for rules in RULES for fault in trained(steps, Part, **rules)]
    found['within forward'] = [fault for rules in RULES for fault in trained(('forward', 'plain'), Calls, **rules)]
    found['in 16 bit'] = in_16_bit()
    return found


def resharded_to_part() -> list[str]:
    rules = [dict(units='part', reshard_after_forward=2)]
    return trained(('after', 'plain', 'forward'), Part, overrides=rules)


def in_16_bit() -> list[str]:
    """A method computes under autocast in val as in training, and hands on float32."""
    torch.manual_seed(0)
    fields = dict(wrap_policy=policy, find_unused_parameters=True, precision=dict(param_dtype='bfloat16'))
    model = ZeroModelWrapper(module=Entered(('plain',)), **fields)
    optim = ZeroOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), dtype='bfloat16')
    optim.initialize_count_status(model, 0, 10)
    seen = []
    model.module.part.b.register_forward_hook(lambda layer, args, out: seen.append((layer.weight.dtype, out.dtype)))
    model.module.head.register_forward_hook(lambda layer, args, out: seen.append((args[0].dtype, out.dtype)))
    for step in range(2):
        model.train_step(toy_batch(step), optim)
        with torch.no_grad():
            model.val_step(toy_batch(step))
    half, single = torch.bfloat16, torch.float32
    wanted = [(half, half), (half, half), (half, half), (single, single)] * 2
    return [] if seen == wanted else [str(seen)]


@pytest.fixture(scope='module')
def found() -> Faults:
    return merged(run_ranks(2, run_cases))


@pytest.mark.parametrize('case', [*(' '.join(steps) for steps in WAYS), 'within forward', 'in 16 bit'])
def test_methods_train_as_under_ddp(found: Faults, case: str) -> None:
    assert not found[case], '\n'.join(found[case])


@pytest.mark.slow
def test_methods_of_what_is_resharded_to_part_of_the_ranks() -> None:
    assert run_ranks(4, resharded_to_part) == [[]] * 4


def test_methods_of_what_is_no_unit() -> None:
    with pytest.raises(PlanError, match="'stem' is no unit, to be entered by a method"):
        with_methods(ModuleClassPolicy(['Part'])(Entered(('plain',))), {'stem': ['plain']})
