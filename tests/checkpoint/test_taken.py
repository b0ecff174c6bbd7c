"""What hooks of a model make of a state dict, seen without loading it."""

import copy
from typing import Any

import pytest
import torch
from mmengine.runner.checkpoint import load_state_dict
from torch import nn

from mmzero.checkpoint.taken import has_hooks, taken_by
from tests.distributed.cases import differing


class Resizes(nn.Module):
    """As position embeddings do, in a hook that looks at its own shape."""

    def __init__(self, length: int = 4) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, length, 3))
        self.register_buffer('index', torch.arange(length))
        self.proj = nn.Linear(3, 3)
        self._register_load_state_dict_pre_hook(self._resize)

    def _resize(self, state: dict, prefix: str, *args: Any) -> None:
        name = f'{prefix}position'
        if name in state and state[name].shape != self.position.shape:
            length = self.state_dict()['position'].shape[1]
            state[name] = nn.functional.interpolate(state[name].mT, length).mT
            # It is what it was made as.
            state.pop(f'{prefix}index', None)


class Renames(nn.Module):
    """As classes do that read files of their older versions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(3)
        self.inner = Resizes()

    def _load_from_state_dict(self, state: dict, prefix: str, *args: Any) -> None:
        for name in list(state):
            if name.startswith(f'{prefix}norm.'):
                state[name.replace('norm.', 'norm1.')] = state.pop(name)
        super()._load_from_state_dict(state, prefix, *args)


class Computes(nn.Conv2d):
    """As mmcv's ConvAWS2d: statistics of the weights that it has loaded."""

    def __init__(self) -> None:
        super().__init__(3, 4, 1)
        self.register_buffer('gamma', torch.zeros(4))

    def _load_from_state_dict(self, state: dict, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state, prefix, *args)
        if f'{prefix}gamma' not in state:
            self.gamma.copy_(self.weight.detach().flatten(1).std(1))


class Prefixes(nn.Module):
    """As mmpretrain's wrappers of timm and transformers: files have the names of the model inside."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self._register_state_dict_hook(self._remove)
        self._register_load_state_dict_pre_hook(self._add)

    @staticmethod
    def _remove(module: nn.Module, state: dict, prefix: str, metadata: Any) -> None:
        for name in list(state):
            state[name.replace(f'{prefix}model.', prefix, 1)] = state.pop(name)

    @staticmethod
    def _add(state: dict, prefix: str, *args: Any) -> None:
        for name in list(state):
            state[name.replace(prefix, f'{prefix}model.', 1)] = state.pop(name)


def old_names() -> dict[str, torch.Tensor]:
    state = Renames().state_dict()
    return {name.replace('norm1.', 'norm.'): value for name, value in state.items()}


CASES: dict[str, tuple[nn.Module, dict]] = {
    'resizes': (Resizes(), Resizes(9).state_dict()),
    'inside': (nn.Sequential(nn.Linear(2, 2), Resizes()), nn.Sequential(nn.Linear(2, 2), Resizes(6)).state_dict()),
    'renames': (Renames(), old_names()),
    'computes': (Computes(), nn.Conv2d(3, 4, 1).state_dict()),
    'computed before': (Computes(), {**Computes().state_dict(), 'gamma': torch.ones(4)}),
    'prefixes': (Prefixes(), Prefixes().state_dict()),
    'no counter': (nn.BatchNorm1d(3), {'weight': torch.rand(3), 'running_mean': torch.rand(3)}),
    'some shapes': (nn.Linear(3, 2), {'weight': torch.rand(4, 3), 'bias': torch.rand(2), 'more': torch.rand(1)}),
}


@pytest.mark.parametrize('case', CASES)
def test_it_is_what_the_plain_model_loads(case: str) -> None:
    model, state = CASES[case]
    before = copy.deepcopy(model.state_dict())
    kept = dict(state)
    parts = {name: id(value) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    taken = taken_by(model, state)
    plain = copy.deepcopy(model)
    load_state_dict(plain, copy.copy(state) if hasattr(state, '_metadata') else dict(state))
    # What is not taken stays.
    assert not differing({**before, **taken.values}, plain.state_dict())
    # Nothing else has changed.
    assert not differing(model.state_dict(), before)
    assert parts == {name: id(value) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    assert list(state) == list(kept)


def test_all_that_does_not_fit_is_told_at_once() -> None:
    state = {'0.weight': torch.rand(4, 3), '1.weight': torch.rand(5), '1.bias': torch.rand(5), 'more': torch.rand(1)}
    taken = taken_by(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)), state)
    assert (taken.missing, taken.left, len(taken.faults), taken.values) == (['0.bias'], ['more'], 3, {})
    assert all(name in fault for name, fault in zip(['0.weight', '1.weight', '1.bias'], taken.faults, strict=True))
    assert 'torch.Size([4, 3])' in taken.faults[0]
    assert 'torch.Size([2, 3])' in taken.faults[0]


@pytest.mark.parametrize(
    ('model', 'expected'),
    [(Resizes(), True), (Renames(), True), (nn.Sequential(nn.BatchNorm1d(2)), False), (nn.Linear(2, 2), False)],
)
def test_models_with_hooks(model: nn.Module, expected: bool) -> None:
    assert has_hooks(model) is expected


class Remembers(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen = 0

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        self.seen = state


def test_what_stands_for_tensors_that_are_not_read() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), Resizes())
    state = {name: value.to('meta') for name, value in model.state_dict().items()}
    state['1.position'] = torch.rand(1, 9, 3)
    taken = taken_by(model, state)
    assert (taken.faults, taken.missing, taken.left) == ([], ['1.index'], [])
    assert {name for name, value in taken.values.items() if not value.is_meta} == {'1.position'}
    assert taken.values['1.position'].shape == (1, 4, 3)


def test_extra_state_is_neither_set_nor_missing() -> None:
    model, source = Remembers(), Remembers()
    source.seen = 3
    taken = taken_by(model, source.state_dict())
    assert (model.seen, taken.missing, taken.left, sorted(taken.values)) == (0, [], [], ['bias', 'weight'])
    assert taken_by(model, dict(weight=model.weight, bias=model.bias)).missing == ['_extra_state']


def test_a_failing_hook_leaves_the_model_as_it_was() -> None:
    model = Resizes()

    def fail(*args: Any) -> None:
        raise KeyError('index')

    model._register_load_state_dict_pre_hook(fail)
    before = {name: id(value) for name, value in model.named_parameters()}
    with pytest.raises(KeyError):
        taken_by(model, model.state_dict())
    assert before == {name: id(value) for name, value in model.named_parameters()}
    assert len(model._load_state_dict_pre_hooks) == 2
