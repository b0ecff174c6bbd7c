"""What a unit holds, used from outside of the unit: refused by name in the first iteration, or right."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.model import BaseModel
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero.errors import PlanError
from mmzero.policies import ModuleClassPolicy, WrapPlan, make_plan
from tests.distributed.cases import Faults, merged
from tests.distributed.parity import BOUNDS, sgd
from tests.distributed.ranks import run_ranks
from tests.distributed.training import compare, train
from tests.models import DINO_BLOCKS, detection_batch, tiny_dino, toy_batch

pytestmark = pytest.mark.distributed


class Inner(nn.Module):
    """What lies inside of a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Part(nn.Module):
    """The unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table, self.scale = Inner(), nn.Embedding(4, 12), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x) * self.scale + self.table.weight[0]

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        """Enters by itself, which works."""
        return self(self(x))

    def score(self, x: torch.Tensor) -> torch.Tensor:
        """Computes with what the unit holds."""
        return x * self.scale


class Outsider(BaseModel):
    """A classifier that uses a part of it in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.part, self.head = way, Part(), nn.Linear(12, 7)

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        x = inputs
        if self.way == 'module before':
            x = x + self.part.inner(x)
        if self.way == 'module in loss' and mode == 'loss':
            x = x + self.part.inner(x)
        if self.way == 'layer before':
            x = x + self.part.inner.linear(x)
        if self.way == 'buffer':
            start = torch.zeros(4, 12)
            start[:] = self.part.table.weight
        x = self.part.twice(x) if self.way == 'own method' else self.part(x)
        if self.way == 'module after' or self.way == 'module in val' and mode == 'predict':
            x = x + self.part.inner(x)
        if self.way == 'method':
            x = self.part.score(x)
        if self.way == 'parameter':
            query = self.part.table.weight.unsqueeze(0)
            x = x + query[:, 1]
        logits = self.head(x)
        if mode == 'predict':
            return list(logits)
        loss = nn.functional.cross_entropy(logits, labels) if labels is not None else None
        if self.way == 'loss':
            loss = self.part.scale * 3
        return dict(loss=loss) if mode == 'loss' else logits


# The way, what is said of it, and how it goes where the unit is still gathered after its forward.
SAID = {
    'module before': ('calls forward() of part.inner, which lies in the unit part (Part)', False),
    'layer before': ('calls forward() of part.inner.linear, which', False),
    'module after': ('calls forward() of part.inner, which', True),
    'method': ('calls score() of part, which lies in the unit part (Part)', True),
    'parameter': ('reads the parameter weight of part.table, which', True),
    'buffer': ('reads the parameter weight of part.table, which', False),
    'loss': ('reads the parameter scale of part, which', None),
}


def only_part(model: nn.Module) -> WrapPlan:
    """Says nothing of what the code does with the unit, as where that cannot be read."""
    return make_plan(model, ['part'], 'Part')


def wrap(net: nn.Module, stage: int = 3, **fields: Any) -> tuple[Any, Any]:
    """The pair."""
    fields = dict(dict(wrap_policy=only_part), **fields)
    model = ZeroModelWrapper(module=net, stage=stage, **fields)
    optim = ZeroOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    optim.initialize_count_status(model, 0, 100)
    return model, optim


def said(run: Callable[[], Any], *parts: str) -> list[str]:
    """What an error leaves out."""
    try:
        run()
    except PlanError as error:
        return [f'{part!r} is not in: {error}' for part in parts if part not in str(error)]
    except Exception as error:  # noqa: BLE001
        return [f'{type(error).__name__} instead of a PlanError: {error}']
    return ['no error']


def line_of(way: str) -> str:
    """Where forward uses the part that way."""
    lines = open(__file__).read().splitlines()
    start = next(i for i, line in enumerate(lines) if f'self.way == {way!r}' in line and line.lstrip().startswith('if'))
    offset = 2 if way == 'buffer' else 1
    return f'{__file__}:{start + 1 + offset} ('


def refused() -> Faults:
    found: Faults = {}
    rank = dist.get_rank()
    for way, (text, _) in SAID.items():
        for name, fields in (('', {}), (' resharded to part', RESHARDED)):
            if name and dist.get_world_size() < 4:
                continue
            model, optim = wrap(Outsider(way), **fields)
            parts = (text, line_of(way), 'Outsider.forward', 'leave Part out of wrap_policy', 'are shards')
            found[f'{way}{name}'] = said(
                lambda model=model, optim=optim: model.train_step(toy_batch(rank), optim), *parts
            )
    return found


RESHARDED = dict(overrides=[dict(units='part', reshard_after_forward=2)])


def in_val() -> list[str]:
    """A use that only predictions make."""
    model, optim = wrap(Outsider('module in val'))
    model.train_step(toy_batch(0), optim)
    with torch.no_grad():
        return said(lambda: model.val_step(toy_batch(0)), 'calls forward() of part.inner, which', 'Outsider.forward')


def after_val() -> list[str]:
    """A use that only training makes, of a unit that an earlier val left gathered: its gradient would be lost."""
    model, optim = wrap(Outsider('module in loss'), stage=2)
    with torch.no_grad():
        model.val_step(toy_batch(0))
    return said(lambda: model.train_step(toy_batch(0), optim), 'calls forward() of part.inner, which')


def nothing_stays() -> list[str]:
    """No mode after the first iteration, and none in the second."""
    seen: list[int] = []
    model, optim = wrap(Outsider('own method'))
    model.module.head.register_forward_hook(lambda *_: seen.append(len(_get_current_function_mode_stack())))
    for _ in range(2):
        model.train_step(toy_batch(0), optim)
        with torch.no_grad():
            model.val_step(toy_batch(0))
            model.test_step(toy_batch(0))
    left = _get_current_function_mode_stack()
    return [] if seen == [1] * 3 + [0] * 3 and not left else [f'{seen}, then {left}']


HOOKS = ('_forward_pre_hooks', '_forward_hooks', '_backward_pre_hooks', '_backward_hooks', '_state_dict_hooks')


def hooks_of(model: nn.Module) -> int:
    """Hooks of all modules, and attributes that modules have been given, such as a method in another's place."""
    modules = list(model.modules())
    return sum(len(getattr(module, kind)) for module in modules for kind in HOOKS) + sum(
        len(vars(module)) for module in modules
    )


def no_hook_stays() -> list[str]:
    """The first iteration of each kind brings hooks, and takes them away again."""
    model, optim = wrap(Outsider('own method'))
    before, seen = hooks_of(model.module), []
    handle = model.module.head.register_forward_pre_hook(lambda *_: seen.append(hooks_of(model.module)))
    for _ in range(2):
        model.train_step(toy_batch(0), optim)
        with torch.no_grad():
            model.val_step(toy_batch(0))
    handle.remove()
    after = hooks_of(model.module)
    # Two units are watched, and the handle is there meanwhile.
    first, later = seen[:2], seen[2:]
    right = after == before and later == [before + 1] * 2 and all(count >= before + 3 for count in first)
    return [] if right else [f'{before}: {seen}, {after}']


def line_that_mends() -> list[str]:
    """What an error says to write into the config works."""
    two = ModuleClassPolicy(['Part', 'Linear'])
    both = lambda model: make_plan(model, ['part', 'head'], 'both')  # noqa: E731
    model, optim = wrap(Outsider('parameter'), wrap_policy=both)
    try:
        model.train_step(toy_batch(0), optim)
    except PlanError as error:
        line = str(error).split('model_wrapper_cfg.wrap_policy=')[1].split(', where')[0]
        policy = eval(line, dict(POLICY=two))  # noqa: S307
        model, optim = wrap(Outsider('parameter'), wrap_policy=policy)
        model.train_step(toy_batch(0), optim)
        units = [unit.name for unit in model.plan.units]
        return [] if 'part' not in units and 'head' in units else [f'{units}']
    return ['no error']


def gathered() -> list[str]:
    """At stage 2 the unit stays gathered after forward: what is used then is right, what is used before is refused."""
    found = []
    for way, (text, works) in SAID.items():
        if works:
            reference = train(lambda way=way: Outsider(way), toy_batch, sgd, {}, {}, 3)
            mine = train(lambda way=way: Outsider(way), toy_batch, sgd, dict(stage=2, wrap_policy=only_part), {}, 3)
            off = compare(mine, reference)
            found += [f'{way}: {what} {value}' for what, value in off.items() if not value <= BOUNDS[what]]
        elif works is False:
            model, optim = wrap(Outsider(way), stage=2)
            found += said(lambda model=model, optim=optim: model.train_step(toy_batch(0), optim), text)
    return found


def own_method() -> list[str]:
    """A method that only calls the unit itself works as it is."""
    reference = train(lambda: Outsider('own method'), toy_batch, sgd, {}, {}, 3)
    off = compare(train(lambda: Outsider('own method'), toy_batch, sgd, dict(wrap_policy=only_part), {}, 3), reference)
    return [f'{what} {value}' for what, value in off.items() if not value <= BOUNDS[what]]


def other_errors() -> list[str]:
    """What fails for another reason says so."""
    model, optim = wrap(Outsider('own method'))
    batch = dict(inputs=torch.ones(2, 5), labels=torch.zeros(2, dtype=torch.long))
    try:
        model.train_step(batch, optim)
    except RuntimeError as error:
        return [] if 'mat1 and mat2' in str(error) else [str(error)]
    return ['no error']


def dino_head() -> list[str]:
    """The head of DINO as a unit, whose insides DINO calls."""
    policy = ModuleClassPolicy([*DINO_BLOCKS, 'DINOHead'])
    found = said(
        lambda: wrap(tiny_dino(), wrap_policy=policy), 'bbox_head (DINOHead) cannot be a unit: DINO.', 'dino.py'
    )
    # As where the sources cannot be read.
    model, optim = wrap(tiny_dino(), wrap_policy=lambda model: replace(policy(model), faults=()))
    parts = ('of bbox_head.cls_branches.', 'the unit bbox_head (DINOHead)', 'mmdet/models', 'leave DINOHead out')
    return found + said(lambda: model.train_step(detection_batch(dist.get_rank()), optim), *parts)


OTHERS = (
    'in_val',
    'after_val',
    'nothing_stays',
    'no_hook_stays',
    'line_that_mends',
    'gathered',
    'own_method',
    'other_errors',
    'dino_head',
)


def on_two() -> Faults:
    cases = [globals()[name] for name in OTHERS]
    return {**refused(), **{case.__name__: case() for case in cases}}


@pytest.fixture(scope='module')
def found() -> Faults:
    return merged(run_ranks(2, on_two))


@pytest.mark.parametrize('case', [*SAID, *OTHERS])
def test_uses_from_outside(found: Faults, case: str) -> None:
    assert not found[case], '\n'.join(found[case])


@pytest.mark.slow
def test_uses_of_what_is_resharded_to_part_of_the_ranks() -> None:
    for case, faults in merged(run_ranks(4, refused)).items():
        assert not faults, f'{case}: {faults}'
