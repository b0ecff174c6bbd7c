"""Code of every kind: what the data decide is found, and what they do not decide is not taken for it."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mmzero.config import ZeroConfig
from mmzero.engines import build_engine
from mmzero.policies import AutoPolicy, ModuleNamePolicy, ineligible
from tests.policies.strange import Pleat


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Pleat(4) for _ in range(4))
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Pleat(4) for _ in range(3))
        self.table = nn.ModuleDict(dict(a=Pleat(4), b=Pleat(4)))
        self.one, self.net = Pleat(4), Net()
        self.names, self.indices, self.depth, self.drop = ['a', 'b'], (0, 1), 3, 0.1


class SetsAttributes(Base):
    def forward(self, x):
        self.flag = torch.rand(1) < 0.5
        if x.sum() > 0:
            self.count = 1
        if self.training:
            for layer in self.layers:
                x = layer(x)
        return x


class HandsIndices(Base):
    def forward(self, x):
        for i in range(3):
            x = checkpoint(self.outer, x, i) if self.depth else self.outer(x, i=i)
        return x

    def outer(self, x, i):
        return self.inner(x, 2 - i)

    def inner(self, x, i, *, name='a'):
        return self.layers[i](x) + self.table[name](x)


class Iterates(Base):
    def forward(self, x):
        for name in self.names:
            x = self.table[name](x)
        for name in ['a', 'b']:
            x = self.table[name](x)
        for name in self.table.keys():
            x = self.table[name](x)
        for i in self.indices:
            x = self.layers[i](x)
        for i in reversed(range(len(self.layers))):
            j = 2 - i
            x = self.layers[i](self.layers[j](x))
        for i, layer in zip(range(3), self.layers, strict=True):
            x = layer(self.layers[i](x))
        i = 0
        while i < len(self.layers):
            x = self.layers[i](x)
            i += 1
        return x


class Asks(Base):
    def forward(self, x, **kwargs):
        if x.dim() == 2 and torch.is_tensor(x) or kwargs.get('mode') == 'a':
            x = self.one(x)
        mean = x.mean(1)
        if mean.ndim == 2 or mean is None or type(x) is tuple:
            x = self.one(x)
        made = [layer(x) for layer in self.layers]
        if len(made) > 2 and any(name == 'a' for name in self.names):
            x = self.one(x)
        for i, (name, layer) in enumerate(self.table.items()):
            if name.startswith('x') or i >= int(self.depth):
                continue
            x = layer(x)
        return x


class HasStatic(Base):
    @staticmethod
    def first(net, x):
        if x.sum() > 0:
            x = net.layers[0](x)
        return x

    def forward(self, x):
        for layer in self.layers:
            x = functools.partial(layer)(x)
        return x


@pytest.mark.parametrize('cls', [SetsAttributes, HandsIndices, Iterates, Asks, HasStatic])
def test_what_every_rank_runs(cls):
    assert not {name: why for name, why in ineligible(cls()).items() if 'skipped' in why}
    assert len(AutoPolicy()(cls()).units) > 3


class Chooses(Base):
    def forward(self, x):
        return self.one(x) if x.sum() > 0 else x


class ChoosesByAnd(Base):
    def forward(self, x):
        return bool(x.sum() > 0) and self.one(x)


class Matches(Base):
    def forward(self, x):
        match int(x.sum()):
            case 0:
                x = self.layers[0](self.one(x))
            case _:
                x = self.layers[0](x)
        return x


class Filters(Base):
    def forward(self, x):
        x = self.one(x) if self.depth else x
        return [layer(x) for layer in self.layers if torch.rand(()) > self.drop]


class AsksNames(Base):
    def forward(self, x):
        number = (x > 0).sum().item()
        has_any = number > 0
        if has_any:
            x = self.one(x)
        return x


class AsksLengths(Base):
    def forward(self, x):
        number = len((x > 0).nonzero())
        if number:
            x = self.one(x)
        return x


class Counts(Base):
    def forward(self, x):
        for i in range(int(x.sum())):
            x = self.layers[i](x)
        return x


class TakesPart(Base):
    def forward(self, x):
        number = int(torch.randint(1, 3, ()))
        for layer in self.layers[:number]:
            x = layer(x)
        return x


class DrawsOne(Base):
    def forward(self, x):
        import random

        return random.choice(self.layers)(x)


class IsConfident(Base):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            sure = x.softmax(-1).max()
            if sure > 0.9:
                return x
        return x


class Repeats(Base):
    def forward(self, x):
        going = True
        while going:
            x = self.one(x)
            going = x.sum() < 0
        return x


class Recovers(Base):
    def forward(self, x):
        try:
            x = x.view(3)
        except RuntimeError:
            x = self.one(x)
        return x


class IsHandedData(Base):
    def forward(self, x):
        return self.pick(x, 0) + self.pick(x, x.argmax())

    def pick(self, x, i):
        return self.layers[i](x)


@pytest.mark.parametrize(
    ('cls', 'name'),
    [(cls, 'one') for cls in (Chooses, ChoosesByAnd, Matches, AsksNames, AsksLengths, Repeats, Recovers)]
    + [(cls, 'layers.1') for cls in (Filters, Counts, TakesPart, DrawsOne, IsConfident, IsHandedData)],
)
def test_what_a_rank_may_skip(cls, name):
    reasons = ineligible(cls())
    assert reasons[name].startswith('may be skipped: ')
    if cls is Matches:
        assert 'layers.0' not in reasons, 'all cases run it'
    if cls is Filters:
        assert 'one' not in reasons


class ReadsProperty(Base):
    @functools.cached_property
    def weight(self):
        return self.one.push.weight

    def forward(self, /, x):
        return x @ self.weight


class Names(Base):
    def forward(self, x):
        one: nn.Module = self.one
        if (other := self.layers[0]) is not None:
            x = other.push(x)
        return {i: layer.push(one.push(x)) for i, layer in enumerate(self.layers)}


class HasText(Base):
    def forward(self, x):
        text = """A text whose second line is
indented less than the code."""
        return self.one.push(x) if text else x


class OwnBase(Base):
    def forward(self, x):
        return self.one.push(x)


class CallsBaseByName(OwnBase):
    def forward(self, x):
        return OwnBase.forward(self, x)


@pytest.mark.parametrize('cls', [ReadsProperty, Names, HasText, CallsBaseByName])
def test_what_is_reached_into(cls):
    assert 'one.push' in ineligible(cls())['one']
    assert ('layers.2' in ineligible(cls())) == (cls is Names)


class OnlyLooks(Base):
    def forward(self, x):
        if len(self.net.layers) > 2 and isinstance(self.net.norm, nn.LayerNorm) and self.net.norm is not None:
            norm = self.net.norm
            for layer in self.net.layers:
                layer.eval()
            x = x.to(norm.weight.device)
        return self.net(x)

    def get_norm(self):
        return self.net.norm

    def size_of_norm(self):
        return self.net.norm.weight.norm()


class UsesItsGetter(OnlyLooks):
    def forward(self, x):
        return self.get_norm()(self.net(x))


def test_units_that_code_only_looks_into_are_not_refused():
    """Nor are such that only methods reach into that no forward calls."""
    engine = build_engine(ZeroConfig())
    engine.check_plan(OnlyLooks(), ModuleNamePolicy(['net'])(OnlyLooks()))
    with pytest.raises(ValueError, match='net.norm outside of its forward'):
        engine.check_plan(UsesItsGetter(), ModuleNamePolicy(['net'])(UsesItsGetter()))


def test_projections_that_torchs_attention_does_not_call():
    reasons = ineligible(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 2, enable_nested_tensor=False))
    assert 'out_proj.weight is used from outside' in reasons['layers.0.self_attn.out_proj']
    assert not {'layers.0', 'layers.0.self_attn', 'layers.0.linear1'} & reasons.keys()


class UsesOtherName(Base):
    def __init__(self):
        super().__init__()
        self.other = self.one

    def forward(self, x):
        return self.one(x) @ self.other.push.weight


def test_what_is_reached_into_under_another_name():
    assert 'push.weight is used from outside' in ineligible(UsesOtherName())['one']


def test_blocks_without_elements():
    blocks = [nn.Sequential(nn.Linear(0, 4, bias=False), nn.Linear(0, 4, bias=False)) for _ in range(2)]
    assert len(AutoPolicy()(nn.ModuleList(blocks)).units) == 1
