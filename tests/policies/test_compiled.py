"""Which units are compiled: those that hold no other, or as rules say."""

import pytest
from torch import nn

from mmzero.config import CompileConfig, OverrideConfig
from mmzero.errors import ConfigError
from mmzero.policies import Gathering, WrapPlan, apply_overrides, choose_compiled, make_plan, plan_figures, plan_table

ON = CompileConfig(is_asked=True)


class Block(nn.Module):
    """Has a forward, and a list of modules, which has none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.items = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x):
        return self.items[0](self.inner(x))


@pytest.fixture
def net() -> nn.Module:
    """A model of two blocks."""
    return nn.ModuleDict(dict(stem=nn.Linear(3, 4), blocks=nn.Sequential(Block(), Block())))


@pytest.fixture
def plan(net) -> WrapPlan:
    """Units of all blocks, one of which holds another."""
    return make_plan(net, ['blocks.0', 'blocks.1', 'blocks.1.inner', 'stem'], 'test')


def compiled(net: nn.Module, plan: WrapPlan, config: CompileConfig = ON, **rules: bool) -> set[str]:
    """Names of the units that are compiled."""
    entries = [OverrideConfig((pattern,), compile=value) for pattern, value in rules.items()]
    chosen = choose_compiled(net, apply_overrides(plan, entries), config)
    return {unit.name for unit in chosen.units if unit.compiled}


def test_by_itself(net, plan):
    assert compiled(net, plan) == {'blocks.0', 'blocks.1.inner', 'stem'}


def test_by_rules(net, plan):
    assert compiled(net, plan, stem=False) == {'blocks.0', 'blocks.1.inner'}
    assert compiled(net, plan, **{'blocks.1': True}) == {'blocks.0', 'blocks.1', 'blocks.1.inner', 'stem'}
    assert compiled(net, plan, **{'**': False, 'stem': True}) == {'stem'}


def test_not_asked_or_disabled(net, plan):
    assert choose_compiled(net, plan, CompileConfig()) == plan
    for found in (
        choose_compiled(net, plan, CompileConfig(disable=True, is_asked=True)),
        choose_compiled(net, plan, ON, looks_inside=True),
    ):
        assert not any(unit.compiled for unit in found.units) and 'all units run as they are' in found.notes[-1]


def test_the_table_says_it(net, plan):
    note = choose_compiled(net, plan, ON).notes[-1]
    assert note.startswith('compiled by torch.compile (inductor), each by itself: ') and note.endswith(', (root)')
    left_out = choose_compiled(net, apply_overrides(plan, [OverrideConfig(('stem',), compile=False)]), ON)
    assert 'stem: compile=False' in plan_table(plan_figures(left_out, Gathering(1, 2)))


def test_nothing_to_compile(net, plan):
    with pytest.raises(ConfigError, match='model_wrapper_cfg.compile: compiles units, and test chooses none'):
        compiled(net, make_plan(net, [], 'test'))
    with pytest.raises(ConfigError, match='would compile nothing, since overrides say compile=False for all units'):
        compiled(net, plan, **{'**': False})


def test_without_a_forward(net):
    plan = make_plan(net, ['blocks.0.items'], 'test')
    with pytest.raises(ConfigError, match='would compile nothing'):
        compiled(net, plan)
    with pytest.raises(ConfigError, match=r'compile=True is for blocks.0.items \(ModuleList\), which has no forward'):
        compiled(net, plan, **{'blocks.0.items': True})
