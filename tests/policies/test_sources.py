"""What can be read from a model's code, and what must not be concluded from it."""

import torch
from torch import nn

from mmzero.policies.sources import uses_in, uses_of


def uses(cls):
    """Path to (is called, may be skipped)."""
    return {'.'.join(use.path): (use.is_called, use.may_skip) for use in uses_of(cls)}


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self._build()
        self.width = self.first.weight.shape[0]

    def _build(self):
        self.first = nn.Linear(2, 2)
        self.built = nn.Linear(2, 2)
        self.built.weight.data.zero_()

    def forward(self, x):
        inner = self.branch.leaf
        return inner(self.first(x)) + self.bias


def test_attributes_through_names_and_not_what_a_constructor_does():
    found = uses(Plain)
    assert found['first'] == (True, False)
    assert found['bias'] == (False, False)
    assert found['branch.leaf'] == (True, False)
    assert not [path for path in found if path.startswith('built') or path == 'first.weight']


class Loops(nn.Module):
    def forward(self, x):
        for layer in self.a:
            x = layer(x)
        for i, layer in enumerate(self.b[1:]):
            x = layer(x) + self.c[i](x)
        for one, other in zip(self.d, self.e, strict=True):
            x = one(other(x))
        for i in range(len(self.f) - 1, -1, -1):
            x = self.f[len(self.f) - 1 - i](x)
        for block in self.g.values():
            x = block.enter(x)
        for row in self.h:
            for cell in row[1]:
                x = cell(x)
        xs = [layer(x) for layer in self.k]
        return self.last[-1](xs), self.picked[x.argmax()](x), self.fixed[self.number](x)


def test_elements_of_containers():
    found = uses(Loops)
    for path in ('a.*', 'b.*', 'c.*', 'd.*', 'e.*', 'f.*', 'g.*.enter', 'h.*.1.*', 'k.*', 'last.-1', 'fixed.*'):
        assert found[path] == (True, False), path
    assert found['picked.?'] == (True, False)


class Branches(nn.Module):
    def forward(self, x, boxes=None):
        if self.training and boxes is not None:
            x = self.constant(x)
        if x.sum() > 0:
            x = self.by_value(x)
        if boxes.shape[0] == 0:
            x = self.by_shape(x)
        if x.any():
            x = self.either(x)
        else:
            x = self.either(x) * 2
        if torch.jit.is_scripting() or len(self.layers) > 2:
            x = self.static(x)
        while not x.all():
            x = self.repeated(x)
        if len(boxes) == 0:
            return x
        return self.after(x)


def test_what_the_data_decide():
    found = uses(Branches)
    skipped = {path for path, (is_called, may_skip) in found.items() if is_called and may_skip}
    assert skipped == {'by_value', 'by_shape', 'repeated', 'after'}


class Drops(nn.Module):
    def forward(self, x):
        for layer in self.layers:
            if self.training:
                chance = torch.rand([])
                if chance < self.layerdrop:
                    continue
            x = layer(x)
        return self.after(x)


def test_layer_drop_names_its_rate():
    (use,) = [use for use in uses_of(Drops) if use.path == ('layers', '*') and use.is_called]
    assert use.may_skip and use.rates == ('layerdrop',)
    assert not next(use for use in uses_of(Drops) if use.path == ('after',)).may_skip


class DropsByFlag(nn.Module):
    def forward(self, x):
        for layer in self.first:
            chance = torch.rand([])
            skip = self.training and chance < self.config.layerdrop
            if not skip:
                x = layer(x)
        for layer in self.second:
            drop = False
            if self.training:
                chance = torch.rand([])
                if chance < self.rate:
                    drop = True
            if not drop:
                x = layer(x)
        return x


def test_layer_drop_through_names():
    """As transformers writes it."""
    found = {use.path[0]: use for use in uses_of(DropsByFlag) if use.is_called and use.path[-1] == '*'}
    assert found['first'].may_skip and found['first'].rates == ('config.layerdrop',)
    assert found['second'].may_skip and found['second'].rates == ('rate',)


class Base(nn.Module):
    def forward(self, x):
        return self.in_base(x)

    def loss(self, x):
        return self(x)


class Extends(Base):
    def forward(self, x):
        return super().forward(self.own(x))


class Replaces(Base):
    def forward(self, x):
        return self.own(x)

    def loss(self, x):
        return self.own(x)


def test_inherited_code_counts_where_it_is_used():
    assert {'in_base', 'own'} <= uses(Extends).keys()
    assert 'in_base' not in uses(Replaces)
    assert uses_in(Extends, 'loss') == () and [use.path for use in uses_in(Replaces, 'loss')] == [('own',)]


def test_classes_of_torch_and_without_source_say_nothing():
    made = type('Made', (nn.Module,), {'forward': eval('lambda self, x: self.layer(x)')})
    assert uses_of(nn.TransformerEncoder) == () == uses_of(made)


class Wraps(nn.Module):
    """Answers for the model in it, and asks it by name."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.model, name)

    def forward(self, x, cache):
        if cache is not None and x.sum() > 0 and getattr(self.other, 'supports_cache', True):
            x = x + 1
        return self.inner(x)


def test_answering_for_names_and_asking_by_name_run_nothing():
    assert uses(Wraps) == {'inner': (True, False)}
