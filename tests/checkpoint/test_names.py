"""Names of weights without the wrappers' parts."""

import pytest

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
