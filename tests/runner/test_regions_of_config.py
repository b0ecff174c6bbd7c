"""``activation_checkpointing`` in a config: both forms, both places, and what is told before a run."""

from typing import Any

import pytest
from mmengine.registry import RUNNERS
from torch import nn

import mmzero  # noqa: F401
from mmzero import ZeroModelWrapper
from mmzero.errors import ConfigError, PlanError
from tests.models import DINO_BLOCKS, ToyModel, tiny_dino
from tests.vectors import vector_runner

BLOCKS = dict(type='ModuleClassPolicy', classes=['Block'])


def faults_of(cfg: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        RUNNERS.build(cfg)
    return str(caught.value)


def wrapped(net: nn.Module, activation_checkpointing: Any, **fields: Any) -> ZeroModelWrapper:
    return ZeroModelWrapper(module=net, activation_checkpointing=activation_checkpointing, **fields)


def regions_of(*args: Any, **fields: Any) -> list[str]:
    return list(wrapped(*args, **fields).patched.regions)


@pytest.mark.parametrize('place', ['', 'model_wrapper_cfg.'])
def test_faults_are_told_where_they_were_written(config: Any, place: str) -> None:
    path = f'{place}activation_checkpointing'
    config.merge_from_dict({path: dict(plicy='AutoPolicy', every=0, save='some')})
    text = faults_of(config)
    for wanted in (
        f"\n- {path}.plicy: unknown field; did you mean 'policy'",
        f'\n- {path}.every: got 0',
        f"\n- {path}.save: got 'some'; allowed",
    ):
        assert wanted in text.replace('  - ', '- ').replace('\n  ', '\n- '), text


@pytest.mark.parametrize(
    'given, wanted',
    [
        (dict(policy='AutPolicy'), ".policy: no wrap policy 'AutPolicy'"),
        (dict(policy=dict(type='ModuleClassPolicy', classes=['SwinBlok'])), "did you mean 'SwinBlock'"),
        (dict(policy='AutoPolicy', modules=['bakbone']), ": DINO has no module 'bakbone'"),
        (dict(save='matmuls'), ': matches nothing in this DINO: no block has with_cp=True, and it names neither'),
        (dict(save='inputs'), ': matches nothing in this DINO'),
        (dict(debug=True, save='matmuls', modules=['neck']), ".debug: got True beside save='matmuls'"),
    ],
)
@pytest.mark.parametrize('place', ['', 'model_wrapper_cfg.'])
def test_what_does_not_fit_the_model(config: Any, place: str, given: dict, wanted: str) -> None:
    path = f'{place}activation_checkpointing'
    config.merge_from_dict({path: given, 'model.backbone.with_cp': False})
    text = faults_of(config)
    assert '1 fault' in text and path in text and wanted in text, text


def test_both_places(config: Any) -> None:
    config.merge_from_dict(
        {'activation_checkpointing': ['neck'], 'model_wrapper_cfg.activation_checkpointing': ['backbone']}
    )
    assert 'activation_checkpointing: is not what model_wrapper_cfg.activation_checkpointing says' in faults_of(config)


class Fails:
    """A policy of a project's, with a bug in it."""

    def __call__(self, model: nn.Module) -> None:
        raise AttributeError('no such thing')


def test_a_policy_with_a_bug(config: Any) -> None:
    config.merge_from_dict({'activation_checkpointing': dict(policy=dict(type=Fails))})
    assert 'activation_checkpointing.policy: ' in faults_of(config)


@pytest.mark.usefixtures('group')
@pytest.mark.parametrize(
    'given, wanted',
    [
        ([], []),
        ((), []),
        ({}, []),
        (['stem', 'blocks.1'], ['stem', 'blocks.1']),
        (dict(modules=['blocks.1', 'stem']), ['stem', 'blocks.1']),
        (dict(policy='AutoPolicy'), ['blocks.0', 'blocks.1', 'blocks.2']),
        (dict(policy=BLOCKS, every=2), ['blocks.0', 'blocks.2']),
        (dict(policy=BLOCKS, every=3, save='matmuls'), ['blocks.0']),
        (dict(policy=BLOCKS, every=2, modules=['blocks.1']), ['blocks.0', 'blocks.1', 'blocks.2']),
        (dict(policy=dict(type='ModuleNamePolicy', names=['blocks.*'])), ['blocks.0', 'blocks.1', 'blocks.2']),
    ],
)
def test_which_modules(given: Any, wanted: list[str]) -> None:
    assert regions_of(ToyModel(), given) == wanted


@pytest.mark.usefixtures('group')
def test_the_top_level_key_takes_a_dict(tmp_path: Any) -> None:
    cfg = dict(
        model_wrapper_cfg=dict(type='ZeroModelWrapper', stage=3, find_unused_parameters=True),
        activation_checkpointing=dict(policy=BLOCKS, every=2),
    )
    runner = vector_runner(tmp_path, cfg=cfg)
    runner.train()
    assert list(runner.model.patched.regions) == ['blocks.0', 'blocks.2']
    assert not runner.model.patched.never_run()


@pytest.mark.usefixtures('group')
@pytest.mark.parametrize('given', [dict(save='matmuls'), dict(early_stop=True)])
def test_settings_alone_are_those_of_blocks_that_ask_by_themselves(given: dict) -> None:
    model = wrapped(tiny_dino(with_cp=True), given)
    assert model.patched.counts == dict(SwinBlock=4)
    assert {region.config.save for region in model.patched.regions.values()} == {given.get('save', 'inputs')}
    with pytest.raises(PlanError, match='matches nothing in this DINO: no block has with_cp=True'):
        wrapped(tiny_dino(with_cp=False), given)


@pytest.mark.usefixtures('group')
def test_each_second_block_of_a_detector_and_the_same_units() -> None:
    policy = dict(type='ModuleClassPolicy', classes=list(DINO_BLOCKS))
    model = wrapped(tiny_dino(with_cp=False), dict(policy=policy, every=2))
    assert list(model.patched.regions) == [
        'backbone.stages.0.blocks.0',
        'backbone.stages.1.blocks.0',
        'encoder.layers.0',
        'decoder.layers.0',
    ]
    plain = wrapped(tiny_dino(with_cp=False), [])
    assert [unit.name for unit in model.plan.units] == [unit.name for unit in plain.plan.units]
