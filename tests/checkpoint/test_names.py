"""Names of weights without the wrappers' parts."""

import pytest
import torch

from mmzero.checkpoint import clean_names, matching_names
from mmzero.errors import CheckpointError


@pytest.mark.parametrize(
    ('saved', 'clean'),
    [
        ('backbone.conv.weight', 'backbone.conv.weight'),
        ('module.backbone.weight', 'backbone.weight'),
        ('_orig_mod.backbone.weight', 'backbone.weight'),
        ('module._orig_mod.backbone.weight', 'backbone.weight'),
        ('_orig_mod.module.backbone.weight', 'backbone.weight'),
        ('backbone._checkpoint_wrapped_module.weight', 'backbone.weight'),
        ('_fsdp_wrapped_module.a._fsdp_wrapped_module.weight', 'a.weight'),
        # Parts of the model's own.
        ('neck.module.weight', 'neck.module.weight'),
        ('module', 'module'),
        ('modules.0.weight', 'modules.0.weight'),
    ],
)
def test_clean_names(saved, clean):
    assert list(clean_names({saved: 1})) == [clean]


@pytest.mark.parametrize(
    ('saved', 'wanted'),
    [
        # DDP, compiled, checkpointed and sharded by FSDP1, in one another and further inside.
        (['module.module.a.w', 'module.module.b'], ['a.w', 'b']),
        (['_orig_mod.module.a.w', '_orig_mod.module.b'], ['a.w', 'b']),
        (['module._fsdp_wrapped_module._orig_mod.a._checkpoint_wrapped_module.w', 'module.b'], ['a.w', 'b']),
        (['a.module.w', 'b'], ['a.w', 'b']),
        (['module.a.module._orig_mod.module.w', 'module.b'], ['a.w', 'b']),
        # Some of the names only.
        (['module.a.w', 'b'], ['a.w', 'b']),
        # Children of the model that are called so.
        (['module.w', 'module.b'], ['module.w', 'module.b']),
        (['module.module.w', 'module.module.b'], ['module.w', 'module.b']),
        (['module.w', 'module.module.w'], ['module.w', 'module.module.w']),
        (['module.module.w', 'module.module.module.w'], ['module.w', 'module.module.w']),
        (['module.module.w', 'module.w'], ['module.w', 'w']),
        (['neck.module.w', 'b'], ['neck.module.w', 'b']),
        (['w', 'b'], ['module.w', 'module.b']),
        (['neck.module.w', 'neck.w'], ['neck.module.w', 'neck.w']),
        # A part of the model that is compiled itself.
        (['a.w', 'b'], ['a._orig_mod.w', 'b']),
        (['module.a._orig_mod.w', 'module.b'], ['a._orig_mod.w', 'b']),
    ],
)
def test_names_of_a_known_model(saved, wanted):
    state = {name: index for index, name in enumerate(saved)}
    found = clean_names(state, wanted)
    assert list(found) == wanted
    assert list(found.values()) == list(state.values())


def test_what_is_not_wanted_keeps_its_name():
    assert list(clean_names({'module.a': 1, 'module.x.module.y': 2}, ['a'])) == ['a', 'x.module.y']
    assert list(clean_names({'a.module.w': 1, 'module.a.w': 2}, ['a.w'])) == ['a.module.w', 'module.a.w']


def test_two_weights_of_one_name_are_refused():
    with pytest.raises(CheckpointError, match='two weights of the checkpoint have one name'):
        clean_names({'a._orig_mod.w': 1, 'a.w': 2})


def test_versions_of_modules_are_kept():
    state = torch.nn.BatchNorm1d(2).state_dict()
    assert clean_names(state)._metadata == state._metadata


def test_an_attribute_named_module_keeps_its_name():
    names = {'module.weight': 1, 'head.weight': 2}
    assert clean_names(names) == names


def test_matching_names():
    assert matching_names(['a', 'b'], iter(['b', 'c']), 'x.pth') == {'b'}


def test_nothing_in_common_is_refused():
    message = (
        r'x.pth: none of its 4 weights is in the model. It holds a, b, c, ...; '
        r'the model wants z. Is it a checkpoint of another model\?'
    )
    with pytest.raises(CheckpointError, match=message):
        matching_names('abcd', 'z', 'x.pth')


def test_empty_checkpoint_is_refused():
    with pytest.raises(CheckpointError, match='none of its 0 weights .* holds nothing'):
        matching_names([], ['z'], 'x.pth')


def test_model_without_weights_wants_nothing():
    assert matching_names(['a'], [], 'x.pth') == set()
