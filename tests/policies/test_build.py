"""The ``wrap_policy`` field."""

import pytest
from torch import nn

from mmzero.errors import PlanError
from mmzero.policies import AutoPolicy, Choice, ModuleClassPolicy, WrapPolicy, build_policy, make_plan
from mmzero.registry import WRAP_POLICIES
from tests.policies.strange import Necklace, Pleat

BLOCKS = dict(type='ModuleClassPolicy', classes=['Block'])


@pytest.fixture
def registered():
    """A policy without arguments, registered under a name of its own for one test."""

    class WholePolicy:
        def __call__(self, model):
            return make_plan(model, (), 'whole')

    WRAP_POLICIES.register_module(module=WholePolicy)
    yield WholePolicy
    del WRAP_POLICIES.module_dict['WholePolicy']


def test_none_is_one_unit(net):
    (root,) = build_policy(None)(net).units
    assert len(root.params) == len(list(net.parameters()))


@pytest.mark.parametrize('kind', ['ModuleClassPolicy', 'mmzero.ModuleClassPolicy', ModuleClassPolicy])
def test_dict(net, kind):
    cfg = dict(BLOCKS, type=kind)
    before = dict(cfg)
    assert len(build_policy(cfg)(net).units) == 4
    assert cfg == before


def test_name(net, registered):
    assert build_policy('WholePolicy')(net).policy == 'whole'


def test_callable_is_used_as_it_is():
    policy = ModuleClassPolicy(['Block'])
    assert build_policy(policy) is policy


@pytest.mark.parametrize(
    ('cfg', 'message'),
    [
        ('ModulClassPolicy', "no wrap policy 'ModulClassPolicy'; did you mean 'ModuleClassPolicy'"),
        (dict(BLOCKS, type='Nope'), "no wrap policy 'Nope'; known are: .*ModuleClassPolicy"),
        (dict(BLOCKS, _delete_=True), "no field '_delete_'; remove it: no base has a wrap_policy"),
        ('GonePolicy', r'one of your own is found once custom_imports names its module'),
        (dict(BLOCKS, klasses=[]), "ModuleClassPolicy has no field 'klasses'; did you mean 'classes'?"),
        (
            'ModuleClassPolicy',
            'ModuleClassPolicy needs classes; give a dict, such as '
            r"dict\(type='ModuleClassPolicy', classes=\['SwinBlock'\]\)",
        ),
        (dict(type='ModuleClassPolicy'), 'ModuleClassPolicy needs classes; give a dict, such as'),
        (dict(type='ModuleClassPolicy', classes='Block'), 'expected a list of class names'),
        (dict(classes=['Block']), r"a dict with type, such as dict\(type='ModuleClassPolicy'"),
        (3, "expected a policy's name"),
        ('torch.nn.Linear', "'torch.nn.Linear' is a module's class, no policy; to name one, such as dict"),
        (nn.Linear, "is a module's class, no policy"),
        (dict(type='SizePolicy', min_params=None), 'min_params: expected a positive integer; got None'),
        (dict(type='transformer_auto_wrap_policy', transformer_layer_cls=[3]), '3 is no class; give its path'),
    ],
)
def test_refused(cfg, message):
    with pytest.raises(ValueError, match=message):
        build_policy(cfg)


@pytest.mark.parametrize(
    ('chosen', 'message'),
    [
        (['blocks.0'], 'Wrong: choose returned a list; expected a Choice'),
        (lambda: Choice('blocks.0'), "Choice.units: expected a tuple of strings, paths of modules; got 'blocks.0'"),
        (lambda: Choice((nn.Linear(1, 1),)), r'Choice.units: expected a tuple of strings.*got \(Linear'),
        (lambda: Choice(('block.0',)), "Wrong: 'block.0' is not a module of Net; did you mean 'blocks.0'"),
    ],
)
def test_a_policy_of_ones_own_that_is_wrong(net, chosen, message):
    class Wrong(WrapPolicy):
        def choose(self, model):
            return chosen() if callable(chosen) else chosen

        def __str__(self):
            return 'Wrong'

    with pytest.raises(ValueError, match=message):
        Wrong()(net)


@pytest.mark.parametrize(
    'cfg',
    [
        dict(type='lambda_auto_wrap_policy', lambda_fn=3),
        dict(type='size_based_auto_wrap_policy', min_num_params='many'),
    ],
)
def test_arguments_that_torchs_functions_do_not_check(cfg, net):
    with pytest.raises(PlanError, match=r'_auto_wrap_policy\(.*\) fails on .*, check its arguments: '):
        build_policy(cfg)(net)


@pytest.mark.parametrize(
    'cfg',
    [
        AutoPolicy,
        'always_wrap_policy',
        dict(type='transformer_auto_wrap_policy', transformer_layer_cls=Pleat),
        dict(type='ModuleWrapPolicy', module_classes=Pleat),
    ],
)
def test_classes_and_functions_as_python_has_them(cfg):
    assert len(build_policy(cfg)(Necklace()).units) > 3
