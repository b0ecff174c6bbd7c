"""Names of weights before and after adapters were put in."""

from collections import OrderedDict

import pytest

from mmzero.checkpoint import clean_names
from mmzero.checkpoint.adapted import names_without_adapters


@pytest.mark.parametrize(
    ('name', 'before'),
    [
        ('llm.base_model.model.model.layers.0.q.base_layer.weight', 'llm.model.layers.0.q.weight'),
        ('llm.base_model.model.lm_head.original_module.weight', 'llm.lm_head.weight'),
        ('llm.base_model.model.lm_head.modules_to_save.default.weight', 'llm.lm_head.weight'),
        ('base_model.model.embed.token_adapter.base_layer.weight', 'embed.weight'),
        # Of a model that is called so itself, behind a prompt.
        ('base_model.model.layers.0.weight', 'model.layers.0.weight'),
        ('backbone.qkv.base_layer.bias', 'backbone.qkv.bias'),
    ],
)
def test_names(name: str, before: str) -> None:
    assert before in names_without_adapters(name)


def test_a_name_without_adapters_has_none_from_before() -> None:
    assert not list(names_without_adapters('backbone.model.qkv.weight'))


def test_a_plain_file_fits_a_model_with_adapters() -> None:
    wanted = [
        'q.base_layer.weight',
        'q.lora_A.default.weight',
        'head.original_module.w',
        'head.modules_to_save.a.w',
        'k',
    ]
    plain = OrderedDict([('q.weight', 1), ('head.w', 2), ('k', 3), ('left', 4)])
    renamed = {'q.base_layer.weight': 1, 'head.original_module.w': 2, 'head.modules_to_save.a.w': 2, 'k': 3, 'left': 4}
    assert clean_names(plain, wanted) == renamed
    # A file with adapters keeps its names.
    adapted = OrderedDict((name, 0) for name in wanted)
    assert clean_names(adapted, wanted) == adapted
