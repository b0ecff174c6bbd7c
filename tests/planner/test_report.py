"""A plan's report as text, as data, and beside others."""

import json

import pytest
import torch

from mmzero.config import ZeroConfig
from mmzero.config.zero import MeshConfig, PrecisionConfig
from mmzero.engines import build_engine
from mmzero.planner import PlanReport, compare_plans, plan_report
from mmzero.policies import make_plan
from mmzero.policies.table import WIDTH
from tests.models import ToyModel

BLOCKS = ('blocks.0', 'blocks.1', 'blocks.2')


def report(units=BLOCKS, world_size: int = 2, micro_batches: int = 1, notes=(), **config) -> PlanReport:
    plan = make_plan(ToyModel(), units, 'a policy', notes)
    return plan_report(build_engine(ZeroConfig(**config)), plan, world_size=world_size, micro_batches=micro_batches)


def test_text_holds_heading_table_collectives_and_notes_in_this_order() -> None:
    text = report(micro_batches=2, notes=('blocks: repeated ' * 12,)).text()
    wanted = (
        'ZeRO stage 3 on 1 x 2 ranks (replicate x shard), wrap policy: a policy',
        'blocks.0-2',
        'peak of gathered parameters',
        'collectives per optimizer step of 2 micro-batches: 16 all_gather, 8 reduce_scatter, 1 all_reduce',
        'blocks: repeated',
    )
    places = [text.index(part) for part in wanted]
    assert places == sorted(places)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert '`- ' not in text and '`- ' in report().text(tree=True)


@pytest.mark.parametrize('stage', [0, 1, 2, 3])
def test_stages_gather_as_they_do(stage: int) -> None:
    found = report(stage=stage, world_size=4, precision=PrecisionConfig(param_dtype=torch.bfloat16))
    gathering = found.figures.gathering
    assert (gathering.replicate, gathering.shard) == ((4, 1) if stage == 0 else (1, 4))
    # DDP casts nothing.
    assert gathering.param_dtype == (torch.bfloat16 if stage else None)
    assert gathering.stays == (stage < 3)


def test_replicas() -> None:
    found = report(world_size=8, mesh=MeshConfig(replicate=2))
    assert '2 x 4 ranks' in found.heading
    assert found.forecast.collectives == dict(all_gather=8, reduce_scatter=4, all_reduce=5)
    with pytest.raises(ValueError, match='does not fill 9 rank'):
        report(world_size=9, mesh=MeshConfig(replicate=2))


def test_json_is_whole() -> None:
    found = report(notes=('why',))
    data = json.loads(json.dumps(found.as_dict()))
    assert [(group['names'], group['alike']) for group in data['units']] == [(list(BLOCKS), 3), ([''], 1)]
    for total in ('parameters', 'gathered_bytes', 'kept_bytes'):
        assert sum(group[total] * group['alike'] for group in data['units']) == data[total]
    assert data['peak_gathered_bytes'] == found.figures.peak_gathered_bytes
    assert data['collectives'] == dict(all_gather=8, reduce_scatter=4, all_reduce=1)
    (scalars,) = data['replicated']
    assert scalars['parameters'] == [f'{name}.scale' for name in BLOCKS]
    assert (data['policy'], data['notes'], data['stage'], data['shard']) == ('a policy', ['why'], 3, 2)
    assert report(stage=0).as_dict()['replicated'] == []


def test_side_by_side() -> None:
    first, second = report(), report(units=())
    lines = compare_plans([first, second], ['blocks', 'one unit']).splitlines()
    assert lines[:2] == ['A: blocks', 'B: one unit']
    rows = {line.rsplit(maxsplit=3)[0]: line.split()[-3:] for line in lines[4:]}
    assert rows['units'] == ['4', '1', '0.25']
    assert rows['all_gather per step'] == ['8', '2', '0.25']
    assert rows['collectives per step'] == ['13', '4', '0.31']
    assert rows['elements moved per step'][2] == '1.00'
    peaks = [item.figures.peak_gathered_bytes for item in (first, second)]
    assert rows['peak gathered MiB'][2] == f'{peaks[1] / peaks[0]:.2f}'


def test_three_plans_each_against_the_first() -> None:
    text = compare_plans([report(), report(units=()), report(units=('blocks',))], ['a', 'b', 'c'])
    assert 'B/A' in text and 'C/A' in text and 'C: c' in text


def test_an_engine_without_forecast() -> None:
    engine = build_engine(ZeroConfig())
    engine.forecast = super(type(engine), engine).forecast  # as of an engine that has none
    found = plan_report(engine, make_plan(ToyModel(), BLOCKS, 'p'), world_size=2)
    assert found.forecast is None and 'collectives' not in found.text()
    assert found.as_dict()['collectives'] is None
    assert 'per step' not in compare_plans([found, found], ['a', 'b'])
