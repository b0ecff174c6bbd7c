"""Units by class name."""

import pytest
from torch import nn

from mmzero.errors import PlanError
from mmzero.policies import ModuleClassPolicy


def units(model, *classes):
    """Names of the units, without the root."""
    return [unit.name for unit in ModuleClassPolicy(classes)(model).units[:-1]]


def test_subclasses_count(net):
    assert units(net, 'Block') == ['blocks.0', 'blocks.1', 'blocks.2']
    assert units(net, 'FancyBlock') == ['blocks.2']


def test_class_counts_by_the_name_of_any_base():
    assert units(nn.Sequential(nn.BatchNorm1d(2)), '_BatchNorm') == ['0']


def test_several_classes_nest(net):
    assert units(net, 'FancyBlock', 'LayerNorm') == [
        'blocks.0.inner.1',
        'blocks.1.inner.1',
        'blocks.2.inner.1',
        'blocks.2',
    ]


def test_class_that_is_not_there_names_near_ones(net):
    with pytest.raises(PlanError, match="no module of Net is of the class 'Blok'; did you mean 'Block'"):
        units(net, 'Blok')


def test_one_missing_class_among_others_is_refused(net):
    with pytest.raises(PlanError, match="class 'SwinBlock'.*'Decoder'") as caught:
        units(net, 'Block', 'SwinBlock', 'Decoder')
    assert "class 'Block'" not in str(caught.value)


@pytest.mark.parametrize('classes', [['Net'], ['Net', 'Block']])
def test_the_model_itself_is_no_class_to_name(net, classes):
    with pytest.raises(PlanError) as caught:
        units(net, *classes)
    wanted = "'Net' is the class of the model itself, which is always the root unit; leave it out of classes"
    assert str(caught.value) == wanted


def test_the_model_itself_and_a_class_that_is_not_there(net):
    with pytest.raises(PlanError, match="'Net' is the class of .*; no module of Net is of the class 'Blok'; did"):
        units(net, 'Net', 'Blok')


@pytest.mark.parametrize('classes', ['Block', [], [1], [nn.Linear], None])
def test_classes_are_a_list_of_names(classes):
    with pytest.raises(ValueError, match='classes: expected a list of class names; got '):
        ModuleClassPolicy(classes)


def test_class_without_parameters_is_refused():
    with pytest.raises(PlanError, match="'ReLU'.* no parameters"):
        units(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), 'ReLU')


def test_model_on_meta(net):
    assert ModuleClassPolicy(['Block'])(net.to('meta')) == ModuleClassPolicy(['Block'])(type(net)())


def test_plan_says_what_chose_it(net):
    assert ModuleClassPolicy(['Block', 'Linear'])(net).policy == 'ModuleClassPolicy(Block, Linear)'
