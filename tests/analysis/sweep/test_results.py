"""The file of results, and its tables."""

import json
from pathlib import Path

from mmzero.analysis.sweep import FAILED, FAILS_PLAINLY, PASSED, Results, Verdict, summary, sweep, table
from mmzero.analysis.sweep.ranks import Limits
from mmzero.analysis.sweep.results import RULES
from mmzero.analysis.sweep.verdict import STATUSES
from tests.tools.processes import ROOT


def verdict(config: str = 'mmdet::dino/dino.py', stage: int = 3, status: str = 'passed', **more: object) -> Verdict:
    return Verdict(config, stage, status, parameters=47_000_000, units=20, size=128, seconds=33.3, **more)


def test_a_second_start_skips_what_is_done(tmp_path: Path) -> None:
    path = tmp_path / 'new' / 'results.jsonl'
    results = Results(path)
    results.add(verdict())
    results.add(verdict(stage=2, status=FAILED, reason='x'))
    again = Results(path)
    assert again.missing('mmdet::dino/dino.py', [1, 2, 3]) == [1]
    assert again.missing('mmdet::dino/dino.py', [2, 3], retry=[FAILED]) == [2]
    assert again.missing('other', [3]) == [3]
    assert again.get('mmdet::dino/dino.py', 2) == verdict(stage=2, status=FAILED, reason='x')
    # The last word counts.
    again.add(verdict(stage=2))
    assert Results(path).get('mmdet::dino/dino.py', 2) == verdict(stage=2)
    # Nothing to do, so no process is started and nothing is written.
    size = path.stat().st_size
    assert sweep([['mmdet::dino/dino.py']], [2, 3], again, limits=Limits()) == [verdict(stage=2), verdict()]
    assert path.stat().st_size == size


def test_the_first_config_of_a_family_that_trains_counts(tmp_path: Path) -> None:
    results = Results(tmp_path / 'results.jsonl')
    for name, status in dict(a=FAILS_PLAINLY, b='passed', c=FAILS_PLAINLY, d=FAILS_PLAINLY).items():
        results.add(verdict(name, status=status))
    found = sweep([['a', 'b', 'never tried'], ['c', 'd']], [3], results, limits=Limits())
    assert [item.config for item in found] == ['b', 'c']


def test_the_results_in_the_docs_are_of_these_rules() -> None:
    """A sweep goes on from them, so what they were measured by must not have changed."""
    entries = [json.loads(line) for line in (ROOT / 'docs/zoo.jsonl').read_text().splitlines()]
    assert len(entries) > 100
    assert {entry.pop('versions')['rules'] for entry in entries} == {RULES}
    verdicts = [Verdict(**entry) for entry in entries]
    assert {verdict.status for verdict in verdicts} <= set(STATUSES) - {FAILED}
    assert all('first' in verdict.equal for verdict in verdicts if verdict.status == PASSED)


def test_other_versions_start_again(tmp_path: Path) -> None:
    path = tmp_path / 'results.jsonl'
    Results(path).add(verdict())
    entry = json.loads(path.read_text())
    entry['versions']['torch'] = '0.1'
    path.write_text(json.dumps(entry) + '\n')
    assert Results(path).missing('mmdet::dino/dino.py', [3]) == [3]


def test_tables() -> None:
    verdicts = [
        verdict(equal=dict(loss=2e-7, norm=9e-7), different=dict(loss=1e-7, norm=4e-7, grad=9e-7, update=3e-5)),
        verdict(stage=2, equal=dict(loss=0.0, norm=3e-5), rounded=dict(equal=dict(loss=0.0, norm=4e-5))),
        Verdict('mmdet::b/c.py', 3, FAILS_PLAINLY, 'KeyError: a | b'),
    ]
    lines = table(verdicts).splitlines()
    assert '| `dino/dino` | 3 | passed | 47.0 | 20 | 128 | norm 9e-07 | update 3e-05 | 33 |' in lines
    assert '| `dino/dino` | 2 | passed | 47.0 | 20 | 128 | norm 3e-05 of 6e-05 |  | 33 |' in lines
    assert r'| `b/c` | 3 | fails plainly | KeyError: a \| b |' in lines
    assert summary(verdicts) == 'stage 2: 1 passed\nstage 3: 1 passed, 1 fails plainly'
