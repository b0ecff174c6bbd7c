"""Good configs, spoilt at random places: a clean refusal that names the place, or a run in which it has its effect.

``python -m pytest tests/runner/test_fuzz.py -s -m slow`` prints the table of all 300 cases. A case is found again by
its seed: ``python -m tests.fuzz.worker DIGITS SEED``.
"""

import copy
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.ranks import run_ranks
from tests.fuzz.bases import register
from tests.fuzz.case import judge, run_case
from tests.fuzz.mutations import FREE_FORM, KINDS, Mutation, mutate
from tests.fuzz.pool import run_cases, table

ALL = range(300)
# In `make test`: every kind, on both models at several settings.
COVERING = range(1000, 1024)
TWO_RANKS = range(2000, 2024)


def assert_right(seeds: range, digits: str) -> None:
    verdicts = list(run_cases(seeds, digits))
    print(f'\nseeds {seeds.start} to {seeds.stop - 1}\n{table(verdicts)}')
    wrong = [f'{v["seed"]} ({v["base"]}) {v["what"]}: {v["outcome"]}: {v["text"]}' for v in verdicts if not v['ok']]
    assert not wrong, '\n'.join(wrong)
    assert len(verdicts) == len(seeds)


def test_covering_set(digits: str) -> None:
    assert_right(COVERING, digits)


@pytest.mark.slow
def test_300_mutations(digits: str) -> None:
    assert_right(ALL, digits)


def on_two_ranks(digits: str, seeds: list[int]) -> list[dict[str, Any]]:
    register()
    verdicts = []
    for seed in seeds:
        verdicts.append(run_case(seed, digits, ranks=dist.get_world_size()).as_dict())
        # A rank that went on alone would wait here for ever.
        dist.barrier()
    return verdicts


@pytest.mark.distributed
@pytest.mark.slow
def test_two_ranks(digits: str) -> None:
    ranks = run_ranks(2, on_two_ranks, digits, list(TWO_RANKS))
    print(f'\n{table(ranks[0])}')
    wrong = [(v['seed'], v['what'], v['text']) for verdicts in ranks for v in verdicts if not v['ok']]
    assert not wrong, wrong
    assert [v['outcome'] for v in ranks[0]] == [v['outcome'] for v in ranks[1]]


# --- the test itself


CONFIG = dict(
    default_scope='mmengine',
    model=dict(type='ToyModel', width=12, train_cfg=dict(anything=1)),
    optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)),
    train_cfg=dict(by_epoch=True, max_epochs=1),
)


@pytest.mark.parametrize('kind', KINDS)
def test_mutations_are_drawn_by_the_seed_and_spare_what_is_free(kind: str) -> None:
    seen = set()
    for seed in range(100):
        first, second = copy.deepcopy(CONFIG), copy.deepcopy(CONFIG)
        done = mutate(first, seed, kind)
        assert [str(item) for item in done] == [str(item) for item in mutate(second, seed, kind)]
        assert first != CONFIG and str(first) == str(second)
        assert not any(item.path.startswith('model.train_cfg') for item in done)
        seen.update(item.path for item in done)
    assert len(seen) > 2
    assert 'model.train_cfg' in FREE_FORM


@pytest.mark.parametrize(
    ('kind', 'outcome', 'text', 'right'),
    [
        ('misspelt key', 'trained', '', False),
        ('unknown key', 'trained', '', False),
        ('wrong type', 'trained', '', False),
        ('out of range', 'trained', '', True),
        ('dropped key', 'trained', '', True),
        ('misspelt key', 'traceback of TypeError', 'lr', False),
        ('misspelt key', 'trained nothing', '', False),
        ('misspelt key', 'refused', 'optim_wrapper.optimizer.lr: wrong', True),
        ('misspelt key', 'refused', '  optim_wrapper.optimizer: wrong', True),
        ('misspelt key', 'refused', '  param_scheduler: wrong', False),
    ],
)
def test_the_judge(kind: str, outcome: str, text: str, right: bool) -> None:
    mutation = Mutation(kind, ('optim_wrapper', 'optimizer'), 'lr', 0.1, 7.5)
    assert judge([mutation], outcome, text, CONFIG)[0] is right
