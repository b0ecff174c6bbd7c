"""``overrides``: what an entry takes, and that every fault is named with its entry."""

import copy

import pytest
import torch

from mmzero.config import Faults, OverrideConfig, ZeroConfig, read_zero_config

PATH = 'model_wrapper_cfg'


def read(**cfg) -> tuple[ZeroConfig, list[str]]:
    """Read fields, with the faults."""
    faults = Faults()
    return read_zero_config(cfg, PATH, faults), faults.lines


def test_entries_are_read_into_frozen_ones():
    given = [
        dict(units='backbone.*', reshard_after_forward='node', param_dtype='float32'),
        dict(units=['(root)', 'head'], shard=False, cast_forward_inputs=True),
        dict(units='embed', shard_dim=1, reshard_after_forward=False),
    ]
    before = copy.deepcopy(given)
    config, faults = read(overrides=given)
    assert not faults and given == before
    assert config.overrides == (
        OverrideConfig(('backbone.*',), reshard_after_forward='node', param_dtype=torch.float32),
        OverrideConfig(('(root)', 'head'), shard=False, cast_forward_inputs=True),
        OverrideConfig(('embed',), shard_dim=1, reshard_after_forward=False),
    )
    assert config.overrides[2].rules() == dict(shard_dim=1, reshard_after_forward=False)


@pytest.mark.parametrize(
    ('entry', 'fault'),
    [
        (3, 'overrides[0]: got 3; expected a dict'),
        (dict(shard=False), "overrides[0].units: is missing; name the units that the entry is for, such as 'backb"),
        (dict(units=[], shard=False), 'overrides[0].units: got []; expected a pattern'),
        (dict(units=3, shard=False), 'overrides[0].units: got 3; expected a pattern'),
        (dict(units=['a', ''], shard=False), "overrides[0].units: got ['a', '']; expected a pattern"),
        (dict(units='a'), 'overrides[0]: says nothing about its units; give one of reshard_after_forward, param_dtype'),
        (dict(units='a', sharded=False), "overrides[0].sharded: unknown field; did you mean 'shard'"),
        (dict(units='a', reshard_after_forward=1), 'reshard_after_forward: got 1; one rank that holds all of a unit'),
        (dict(units='a', reshard_after_forward=0), 'reshard_after_forward: got 0; allowed: True, False, '),
        (dict(units='a', reshard_after_forward=2.0), 'reshard_after_forward: got 2.0; allowed'),
        (dict(units='a', reshard_after_forward='nodes'), "reshard_after_forward: got 'nodes'; allowed"),
        (dict(units='a', reshard_after_forward=[2]), 'reshard_after_forward: got [2]; allowed'),
        (dict(units='a', param_dtype='bf16'), "param_dtype: got 'bf16'; expected None or the name of a dtype"),
        (dict(units='a', cast_forward_inputs=1), 'cast_forward_inputs: got 1; allowed: None, True, False'),
        (dict(units='a', shard_dim=-1), 'shard_dim: got -1; allowed: 0, 1, 2'),
        (dict(units='a', shard_dim=True), 'shard_dim: got True; allowed: 0, 1, 2'),
        (
            dict(units='a', shard=False, shard_dim=1),
            'overrides[0].shard_dim: got 1 beside shard=False, which leaves nothing to shard; remove one',
        ),
        (
            dict(units='a', shard=False, reshard_after_forward=True),
            'overrides[0].reshard_after_forward: got True beside shard=False',
        ),
    ],
)
def test_fault_of_an_entry(entry, fault):
    (line,) = read(overrides=[entry])[1]
    assert line.startswith(f'{PATH}.overrides[0]')
    assert fault in line


@pytest.mark.parametrize('value', [None, 'a', dict(units='a', shard=False), 3])
def test_overrides_are_a_list(value):
    assert read(overrides=value)[1] == [f'{PATH}.overrides: got {value!r}; expected a list of dicts']


def test_faults_of_all_entries_at_once():
    entries = [dict(units='a', shard=3), dict(units='b', shard=False), dict(unit='c', shard_dim=1)]
    _, faults = read(stage=4, overrides=entries)
    # Contradictions of a stage are told once there is one.
    assert [line.split(': ')[0] for line in faults] == [
        f'{PATH}.stage',
        f'{PATH}.overrides[0].shard',
        f'{PATH}.overrides[2].unit',
    ]


@pytest.mark.parametrize('stage', [1, 2])
def test_parameters_stay_gathered_at_stages_1_and_2(stage):
    (line,) = read(stage=stage, overrides=[dict(units='a', reshard_after_forward=True)])[1]
    assert line.startswith(f'{PATH}.overrides[0].reshard_after_forward: got True; at stage {stage} parameters stay')
    assert 'Use stage=3' in line
    assert not read(stage=stage, overrides=[dict(units='a', shard=False)])[1]


def test_stage_0_has_no_units():
    (line,) = read(stage=0, overrides=[dict(units='a', shard=False)])[1]
    assert line.startswith(f'{PATH}.overrides: needs stage 1, 2 or 3')
    assert not read(stage=0, overrides=[])[1]
