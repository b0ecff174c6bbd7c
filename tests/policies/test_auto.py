"""AutoPolicy on models whose names it cannot know."""

from torch import nn

from mmzero.policies import AutoPolicy, build_policy
from tests.policies.strange import Bellows, Fan, Necklace


def plan_of(model):
    plan = AutoPolicy()(model)
    return sorted(unit.name for unit in plan.units[:-1]), '\n'.join(plan.notes)


def test_blocks_that_are_plain_attributes():
    """Neither the head and what is in it nor experts that the data pick are units."""
    names, notes = plan_of(Bellows())
    assert names == ['east', 'north', 'south']
    pleats, choir, judge = notes.splitlines()
    assert pleats == 'Pleat: repeated 3 times (north ... south), 416 parameters each'
    assert choir.startswith('Pleat, repeated 4 times, is no unit: choir.0 may be skipped: Bellows.forward (')
    assert judge == 'Pleat, repeated 2 times, is no unit: judge.tower.0 belongs to the head judge'


def test_stages_are_divided_into_their_blocks():
    names, notes = plan_of(Necklace())
    beads = [f'rings.a.beads.{i}' for i in range(3)] + [f'rings.b.beads.{i}' for i in range(6)]
    beads += [f'rings.c.beads.{i}' for i in range(3)]
    assert names == sorted([*beads, *(f'rings.{ring}.extra.{i}' for ring in 'abc' for i in range(2))])
    assert 'Pleat: repeated 9 times (rings.a.beads.1 ... rings.c.beads.2)' in notes


def test_what_is_dropped_at_random_is_no_unit():
    names, notes = plan_of(Necklace(drop=0.1))
    assert names and not [name for name in names if 'extra' in name]
    assert 'WidePleat, repeated 2 times, is no unit: rings.c.extra.0 may be skipped: Ring.forward (' in notes


def test_blocks_without_a_class_and_tied_ones():
    names, notes = plan_of(Fan())
    assert names == ['folds.0', 'folds.1', 'folds.2']
    assert 'folds.3 is no unit: folds.3.1.weight and folds.4.1.weight are one tied parameter' in notes


def test_a_model_without_repeated_blocks_is_one_unit():
    plan = AutoPolicy()(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    assert len(plan.units) == 1
    assert plan.notes[0] == 'AutoPolicy: no block is repeated; the whole model is one unit'


def test_attention_and_ffn_of_a_block_stay_together():
    layer = nn.TransformerEncoderLayer(16, 2, 32)
    names, _ = plan_of(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))
    assert names == ['layers.0', 'layers.1', 'layers.2']


def test_the_smallest_stay_in_the_root():
    """A hundredth of the peak is not worth a collective."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(n, n), nn.Linear(n, n)) for n in (2, 64, 64, 64)))
    names, notes = plan_of(model)
    assert names == ['1', '2', '3']
    assert notes.endswith('too small to be worth a collective: 0')


def test_plans_on_meta_are_the_same():
    assert AutoPolicy()(Necklace().to('meta')) == AutoPolicy()(Necklace())


def test_large_layers_in_the_root_are_named():
    """A policy by name takes them; what is tied, or used from outside, is not offered."""
    model = Bellows()
    model.mouth = nn.Linear(500, 8)
    *_, hint = AutoPolicy()(model).notes
    assert hint.startswith("in the root unit: mouth (4,008 parameters); wrap_policy=['AutoPolicy', dict(type='Module")
    assert "names=['mouth'])] makes units of them" in hint
    followed = build_policy(['AutoPolicy', dict(type='ModuleNamePolicy', names=['mouth'])])(model)
    assert not [note for note in followed.notes if 'in the root unit' in note]
    model.judge.out = nn.Linear(8, 900)
    note = next(note for note in AutoPolicy()(model).notes if 'judge.out' in note)
    assert (
        note == 'in the root unit: judge.out (8,100 parameters), which is no unit: is a single layer in the head judge'
    )
    fan = Fan()
    fan.words = nn.Embedding(1000, 8)
    fan.speak.weight = fan.words.weight
    assert not [note for note in AutoPolicy()(fan).notes if 'in the root unit' in note]


def test_alike_blocks_stay_together():
    """Of blocks of one size none is left out alone."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(n, n), nn.Linear(n, n)) for n in (4, 4, 4, 64, 64, 64)))
    names, notes = plan_of(model)
    assert names == ['3', '4', '5'] and notes.endswith('collective: 0, 1, 2')
