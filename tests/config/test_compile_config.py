"""``compile``: what it takes, and that every fault is named."""

import copy

import pytest
import torch

from mmzero.config import CompileConfig, Faults, ZeroConfig, read_zero_config


def read(**cfg) -> tuple[ZeroConfig, list[str]]:
    """Read fields, with the faults."""
    faults = Faults()
    return read_zero_config(cfg, 'model_wrapper_cfg', faults), faults.lines


@pytest.mark.parametrize('value', [None, False])
def test_off(value):
    config, faults = read(compile=value)
    assert not faults and not config.compile.is_asked and not config.compile.is_on


def test_arguments_reach_torch_and_options_stay():
    given = dict(backend='inductor', options={'shape_padding': True}, dynamic=False, fullgraph=True, target='forward')
    before = copy.deepcopy(given)
    config, faults = read(compile=given)
    assert not faults and config.compile.is_on
    arguments = config.compile.arguments()
    arguments['options'].clear()
    assert given == before and config.compile.arguments() == dict(
        backend='inductor', mode=None, options={'shape_padding': True}, dynamic=False, fullgraph=True
    )
    torch.compile(lambda x: x, **config.compile.arguments())


def test_true_is_an_empty_dict():
    assert read(compile=True)[0].compile == read(compile={})[0].compile == CompileConfig()
    assert read(compile=True)[0].compile.is_on and read(compile={})[0].compile.is_on


def test_a_function_as_backend():
    config, faults = read(compile=dict(backend=test_off))
    assert not faults and config.compile.backend_name == 'test_off'


def test_disabled():
    config, faults = read(compile=dict(disable=True))
    assert not faults and config.compile.is_asked and not config.compile.is_on


@pytest.mark.parametrize(
    ('value', 'fault'),
    [
        (3, "compile: got 3; expected True, False, or a dict, such as dict(backend='inductor')"),
        (dict(backend='inducter'), "compile.backend: got 'inducter'; no backend of torch.compile; did you mean 'ind"),
        (dict(mode='max'), "compile.mode: got 'max'; allowed: None, 'default', 'reduce-overhead'"),
        (dict(modes='default'), "compile.modes: unknown field; did you mean 'mode'?"),
        (dict(target='train_step'), "compile.target: got 'train_step'; allowed: 'forward'; each unit is compiled by"),
        (dict(mode='default', options={}), "compile.mode: got 'default' beside options"),
        (dict(mode='max-autotune', backend='eager'), "compile.mode: got 'max-autotune'; it is for backend='inductor'"),
        (dict(options={'shape_paddin': 1}), "compile.options: 'shape_paddin' is no option of inductor; did you mean"),
        (dict(options=3), 'compile.options: got 3; expected None or a dict of options'),
        (dict(fullgraph=1), 'compile.fullgraph: got 1; allowed: True, False'),
        (dict(dynamic='yes'), "compile.dynamic: got 'yes'; allowed: None, True, False"),
    ],
)
def test_faults(value, fault):
    _, faults = read(compile=value)
    assert len(faults) == 1 and faults[0].startswith(f'model_wrapper_cfg.{fault}')


def test_rules_for_units_at_stage_0():
    entry = dict(units='a', compile=False)
    config, faults = read(stage=0, compile=True, overrides=[entry])
    assert not faults and config.overrides[0].rules() == dict(compile=False)
    _, faults = read(stage=0, compile=True, overrides=[dict(entry, shard=False)])
    assert len(faults) == 1 and 'may have units and compile alone' in faults[0]


def test_a_rule_alone_does_not_say_how():
    _, faults = read(overrides=[dict(units='a', compile=True)])
    assert faults == [
        'model_wrapper_cfg.overrides[0].compile: got True, and nothing says how; set model_wrapper_cfg.compile, too'
    ]
