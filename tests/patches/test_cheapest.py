"""The cheapest set that fits, against all sets there are."""

import itertools
import random
from dataclasses import replace

import pytest

from mmzero.patches.cheapest import Measured, cheapest, choice_of, peak_of


def modules_at_random(seed, count=9):
    draw = random.Random(seed)
    return [
        Measured(
            str(index), (kept := draw.randint(100, 2000)) // draw.randint(1, 9), kept, kept, draw.randint(1, 50) / 10
        )
        for index in range(count)
    ]


def all_choices(modules, other):
    names = [module.name for module in modules]
    for size in range(len(names) + 1):
        for chosen in itertools.combinations(names, size):
            yield choice_of(modules, other, frozenset(chosen))


@pytest.mark.parametrize('seed', range(8))
@pytest.mark.parametrize('share', [0.45, 0.6, 0.8, 0.95])
@pytest.mark.parametrize('frozen', [0, 3])
def test_as_cheap_as_the_best_of_all_sets(seed, share, frozen):
    modules, other = modules_at_random(seed), 300
    # They keep nothing, whatever their inputs are.
    modules[2 : 2 + frozen] = [replace(module, kept=0, at_once=0) for module in modules[2 : 2 + frozen]]
    memory = int(share * peak_of(modules, other, frozenset()))
    fitting = [choice for choice in all_choices(modules, other) if choice.peak <= memory]
    found = cheapest(modules, other, memory)
    if not fitting:
        assert found is None
        return
    best = min(choice.seconds for choice in fitting)
    assert found.peak <= memory
    assert found.seconds == pytest.approx(best)


def test_nothing_is_recomputed_where_all_fits():
    modules = modules_at_random(0)
    found = cheapest(modules, 10, peak_of(modules, 10, frozenset()))
    assert found.recomputed == frozenset() and found.seconds == 0


def test_nothing_fits():
    modules = modules_at_random(0)
    everything = frozenset(module.name for module in modules)
    assert cheapest(modules, 10, 10 + sum(module.inputs for module in modules) - 1) is None
    assert cheapest(modules, 10, peak_of(modules, 10, everything)) is not None


def test_a_recompute_takes_memory_while_backward_passes_it():
    # Two alike; either would do at the end of forward, but the last is recomputed beside what the first has kept.
    first, last = Measured('first', 10, 100, 100, 1.0), Measured('last', 10, 100, 100, 1.0)
    assert peak_of([first, last], 0, frozenset({'last'})) == 210
    assert peak_of([first, last], 0, frozenset({'first'})) == 110
    assert cheapest([first, last], 0, 120).recomputed == {'first'}


def test_a_module_that_keeps_less_than_its_inputs_is_never_recomputed():
    assert cheapest([Measured('a', 50, 10, 10, 1.0)], 0, 50).recomputed == frozenset()


def test_many_modules_alike():
    modules = [Measured(str(index), 1, 1000, 1000, 1.0) for index in range(200)]
    found = cheapest(modules, 0, 101_500)
    # Their inputs take 200; of what is left, 101 times 999 fit.
    assert len(found.recomputed) == 99
