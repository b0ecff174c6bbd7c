"""Which modules cannot be units."""

import pytest
from torch import nn

from mmzero.config import ZeroConfig
from mmzero.engines import build_engine
from mmzero.errors import PlanError
from mmzero.policies import ModuleClassPolicy, ModuleNamePolicy, ineligible
from mmzero.policies.reach import reaches
from tests.models import tiny_dino
from tests.policies.strange import Bellows, Necklace, Regions


def test_reasons():
    reasons = ineligible(Bellows())
    assert 'judge is entered by' not in reasons['judge'] and 'is entered by loss: Bellows.forward' in reasons['judge']
    assert reasons['judge.tower.0'] == 'belongs to the head judge'
    assert reasons['choir.2'].startswith('may be skipped: Bellows.forward (')
    assert reasons['choir'] == 'has no forward of its own'
    assert reasons['choir.2.push'].startswith('is in choir.2, which may be skipped: Bellows.forward (')
    assert not {'north', 'mouth', 'north.push'} & reasons.keys()


def test_a_rate_of_zero_drops_nothing():
    assert 'rings.a.extra.0' in ineligible(Necklace(drop=0.1))
    assert 'rings.a.extra.0' not in ineligible(Necklace(drop=0.0))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)


class ReachesIn(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        width = self.inner.layer.weight.shape[0]
        return self.inner(x) + self.inner.embed.weight[0, :width]


@pytest.mark.parametrize('policy', [ModuleClassPolicy(['Inner']), ModuleNamePolicy(['inner'])])
def test_a_unit_into_which_code_reaches_is_refused(policy):
    plan = policy(ReachesIn())
    message = r'inner \(Inner\) cannot be a unit: ReachesIn.forward \(.*test_eligible.py:\d+\) uses inner.embed.weight'
    for stage in (1, 2, 3):
        with pytest.raises(PlanError, match=message):
            build_engine(ZeroConfig(stage=stage)).check_plan(ReachesIn(), plan)
    build_engine(ZeroConfig(stage=0)).check_plan(ReachesIn(), plan)
    assert set(reaches(ReachesIn())['inner'].inside) == {'inner.embed.weight'}


@pytest.mark.parametrize('name', ['bbox_head', 'dn_query_generator.label_embedding', 'query_embedding'])
def test_parts_of_dino_that_others_reach_into(name):
    """DINO calls its head's branches from the decoder, and reads embeddings where they are not called."""
    model = tiny_dino()
    plan = ModuleNamePolicy([name, 'decoder'])(model)
    with pytest.raises(PlanError, match=f'^{name} .* cannot be a unit: .*dino.py:'):
        build_engine(ZeroConfig()).check_plan(model, plan)


def test_what_is_named_without_forward():
    with pytest.raises(PlanError, match=r"'choir' names choir, a ModuleList.*such as 'choir.\*'"):
        ModuleNamePolicy(['choir'])(Bellows())


def test_a_named_unit_that_a_rank_may_skip_is_told():
    """The code cannot say that a rank will; the user may know better."""
    plan = ModuleNamePolicy(['choir.*', 'north'])(Bellows())
    assert len(plan.notes) == 4
    assert plan.notes[1].startswith('choir.1 (Pleat) has to run on every rank or on none, else ranks hang: Bellows.f')


def test_what_works_on_regions():
    """One rank may find none: no unit, and told where it is named."""
    model = nn.Sequential(nn.Linear(4, 8), Regions(8))
    reasons = ineligible(model)
    assert {'1.judge', '1.judge.tower.0', '1.judge.tower.0.push', '1.judge.out'} <= reasons.keys()
    (note,) = ModuleNamePolicy(['1.judge.tower.0'])(model).notes
    assert note == (
        '1.judge.tower.0 (Pleat) has to run on every rank or on none, else ranks hang: 1 works on the regions that a '
        'rank finds'
    )


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)

    def score(self, x):
        return self._inner(x)

    def _inner(self, x):
        return self.layer(x).sum()

    def twice(self, x):
        return self(self(x))

    def width(self):
        return self.layer.weight.shape[0]


class UsesScorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.scorer = Scorer()

    def forward(self, x):
        return self.scorer.score(self.scorer.twice(x)) / self.scorer.width()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self._inner(x)

    def again(self, x):
        return self.linear(x)

    def _inner(self, x):
        return self.linear(x)

    def never(self, x):
        return self.linear(x)


class ByName(nn.Module):
    """Runs its layers by their names, once by forward and once by another method, as DetectoRS does."""

    def __init__(self):
        super().__init__()
        self.stage = nn.Sequential(Layer(), Layer())
        self.names = ['stage']

    def forward(self, x):
        for name in self.names:
            x = getattr(self, name)(x)
            for layer in getattr(self, name):
                x = layer.again(x)
        return x


def test_methods_of_what_is_got_by_its_name():
    *_, unit = (unit for unit in ModuleClassPolicy(['Layer'])(ByName()).units if unit.name)
    assert unit.methods == ('again',)


def test_methods_by_which_a_unit_is_entered():
    """Such as only call the unit, or look at its shapes, need nothing gathered."""
    *_, unit = (unit for unit in ModuleNamePolicy(['scorer'])(UsesScorer()).units if unit.name)
    assert unit.methods == ('score',)
    assert 'scorer' in ineligible(UsesScorer())
