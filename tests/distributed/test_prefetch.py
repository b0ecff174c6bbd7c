"""Units are gathered one ahead in forwards of training, and never where it could leave old weights behind."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero._compat.fsdp2 import _call_before, _param_groups
from tests.distributed.ranks import run_ranks
from tests.models import ToyModel, toy_batch

pytestmark = pytest.mark.distributed

BLOCKS = dict(type='ModuleClassPolicy', classes=['Block'])


class Skipping(ToyModel):
    """Its last block runs in training only; with ``twice`` its first one runs again."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__(scalar=False)
        self.twice = twice

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        x = self.stem(inputs)
        for block in self.blocks if mode == 'loss' else self.blocks[:-1]:
            x = block(x)
        logits = self.head(self.blocks[0](x) if self.twice else x)
        return dict(loss=torch.nn.functional.cross_entropy(logits, labels)) if mode == 'loss' else list(logits)


def wrapped(**options: Any) -> tuple[Any, Any, list[str]]:
    """A model, its optimizer, and what becomes of its units: gathers, and forwards."""
    torch.manual_seed(0)
    model = ZeroModelWrapper(module=Skipping(**options), wrap_policy=BLOCKS, find_unused_parameters=True)
    events: list[str] = []
    for name, module in model.module.named_modules():
        if isinstance(module, FSDPModule) and name:
            (group,) = _param_groups(module)
            _call_before(group, 'unshard', lambda name=name: events.append(f'gather {name}'))
            module.register_forward_hook(lambda *_, name=name: events.append(f'forward {name}'))
    optim = ZeroOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    optim.initialize_count_status(model, 0, 100)
    return model, optim, events


def events_of(events: list[str], run: Any) -> list[str]:
    """What happens up to the last forward of a unit."""
    events.clear()
    run()
    last = max(index for index, event in enumerate(events) if event.startswith('forward'))
    return list(dict.fromkeys(events[: last + 1]))


def orders(twice: bool) -> list[list[str]]:
    model, optim, events = wrapped(twice=twice)
    found = [events_of(events, lambda: model.train_step(toy_batch(0), optim)) for _ in range(3)]
    with torch.no_grad():
        found.append(events_of(events, lambda: model.val_step(toy_batch(0))))
    return found


ONE_BY_ONE = [f'{what} blocks.{index}' for index in range(3) for what in ('gather', 'forward')]
ONE_AHEAD = [
    'gather blocks.0',
    'gather blocks.1',
    'forward blocks.0',
    'gather blocks.2',
    *ONE_BY_ONE[3:4],
    ONE_BY_ONE[5],
]


def test_one_ahead_from_the_second_forward_of_training_on() -> None:
    for first, second, third, val in run_ranks(2, orders, False):
        assert first == ONE_BY_ONE
        assert second == third == ONE_AHEAD
        assert val == ONE_BY_ONE[:4]


def test_not_where_a_unit_runs_twice() -> None:
    for found in run_ranks(2, orders, True):
        assert all(events[:4] == ONE_BY_ONE[:4] for events in found)


def fail(*_: Any) -> None:
    raise ValueError('in a block')


def loss_with_new_weights(before: str) -> float:
    model, optim, _ = wrapped()
    for step in range(2):
        model.train_step(toy_batch(step), optim)
    # Each ends without a forward of the last block, which a gather ahead would leave with what it holds now.
    if before == 'val':
        with torch.no_grad():
            model.val_step(toy_batch(0))
    elif before == 'error':
        handle = model.module.blocks[1].register_forward_hook(fail)
        with pytest.raises(ValueError, match='in a block'):
            model.train_step(toy_batch(2), optim)
        handle.remove()
    torch.manual_seed(5)
    model.load_state_dict({name: torch.randn(value.shape) for name, value in model.state_dict().items()})
    return float(model.train_step(toy_batch(7), optim)['loss'].detach())


def all_of_them() -> list[float]:
    return [loss_with_new_weights(before) for before in ('', 'val', 'error')]


def test_weights_that_are_loaded_are_used() -> None:
    for without, after_val, after_error in run_ranks(2, all_of_them):
        assert without == after_val == after_error
