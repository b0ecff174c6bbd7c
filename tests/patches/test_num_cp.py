"""mmdet's ``num_cp`` without fairscale, and with it."""

import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import mmzero  # noqa: F401
from mmzero.config import CheckpointingConfig
from mmzero.integrations.mmdet.num_cp import replace_wrapper
from mmzero.patches import apply_patches
from tests.patches.families import check_same_step, counted, results

pytest.importorskip('mmdet')

ATTENTION = dict(embed_dims=32, num_heads=4, num_levels=2, dropout=0.5)
LAYER = dict(
    self_attn_cfg=ATTENTION,
    ffn_cfg=dict(embed_dims=32, feedforward_channels=16, ffn_drop=0.5),
)


def deformable(num_cp: int, cls: str = 'DeformableDetrTransformerEncoder', **options: Any) -> nn.Module:
    """An encoder of three layers that get keyword arguments."""
    from mmdet.models.layers import transformer

    torch.manual_seed(0)
    return getattr(transformer, cls)(num_layers=3, layer_cfg=LAYER, num_cp=num_cp, **options).train()


def detr(num_cp: int) -> nn.Module:
    from mmdet.models.layers import DetrTransformerEncoder

    torch.manual_seed(0)
    cfg = dict(LAYER, self_attn_cfg=dict(embed_dims=32, num_heads=4, dropout=0.5, batch_first=True))
    return DetrTransformerEncoder(num_layers=3, layer_cfg=cfg, num_cp=num_cp).train()


def grounding(num_cp: int) -> nn.Module:
    from mmengine.config import ConfigDict

    # Its code reads the number of heads as an attribute.
    text = ConfigDict(
        self_attn_cfg=dict(num_heads=2, embed_dims=32), ffn_cfg=dict(embed_dims=32, feedforward_channels=16)
    )
    fusion = dict(v_dim=32, l_dim=32, embed_dim=16, num_heads=2, init_values=1e-2)
    return deformable(num_cp, 'GroundingDinoTransformerEncoder', text_layer_cfg=text, fusion_layer_cfg=fusion)


def run_deformable(model: nn.Module, **texts: torch.Tensor) -> Any:
    return model(
        query=torch.randn(2, 20, 32),
        query_pos=torch.randn(2, 20, 32),
        key_padding_mask=torch.zeros(2, 20, dtype=torch.bool),
        spatial_shapes=torch.tensor([[4, 4], [2, 2]]),
        level_start_index=torch.tensor([0, 16]),
        valid_ratios=torch.ones(2, 2, 2),
        **texts,
    )


def run_grounding(model: nn.Module) -> Any:
    return run_deformable(
        model,
        memory_text=torch.randn(2, 5, 32),
        text_attention_mask=torch.zeros(2, 5, dtype=torch.bool),
        pos_text=torch.randn(2, 5, 32),
        text_self_attention_masks=torch.ones(2, 5, 5, dtype=torch.bool),
    )


def run_detr(model: nn.Module) -> Any:
    return model(torch.randn(2, 20, 32), torch.randn(2, 20, 32), torch.zeros(2, 20, dtype=torch.bool))


ENCODERS = {
    'DETR': (detr, run_detr, ['layers.0', 'layers.1']),
    'Deformable DETR': (deformable, run_deformable, ['layers.0', 'layers.1']),
    'Grounding DINO': (grounding, run_grounding, ['layers.0', 'layers.1', 'fusion_layers.0', 'fusion_layers.1']),
}


@pytest.fixture(params=ENCODERS)
def encoder(request: pytest.FixtureRequest) -> tuple:
    """What builds an encoder, what runs it, and the paths that ``num_cp=2`` means."""
    return ENCODERS[request.param]


def test_first_layers_are_regions(encoder: tuple) -> None:
    build, run, paths = encoder
    applied = check_same_step(build(2), run, plain=build(-1))
    assert sorted(applied.regions) == sorted(paths)


def test_settings_are_those_of_the_run(encoder: tuple) -> None:
    build, run, _ = encoder
    applied = check_same_step(build(2), run, CheckpointingConfig(save='matmuls'), plain=build(-1))
    assert all(region.config.save == 'matmuls' for region in applied.regions.values())


def test_recomputes_without_the_pair(encoder: tuple) -> None:
    """A model that nobody patches is not left without what its config asks for."""
    build, run, paths = encoder
    model, plain = build(2), build(-1)
    with counted() as calls:
        found = results(model, run)
    assert (calls.reentrant, calls.non_reentrant) == (0, len(paths))
    expected = results(plain, run)
    assert all(value is found[name] or torch.equal(value, found[name]) for name, value in expected.items())


def test_no_layers_where_it_is_off() -> None:
    assert not apply_patches(deformable(-1)).regions
    assert not apply_patches(deformable(0)).regions


def test_undo() -> None:
    model = deformable(2)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    apply_patches(model).undo()
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_tree_and_names_stay() -> None:
    trees = [[(name, type(module)) for name, module in deformable(num).named_modules()] for num in (2, -1)]
    assert trees[0] == trees[1]
    assert list(deformable(2).state_dict()) == list(deformable(-1).state_dict())


def test_layer_that_fairscale_has_wrapped_before() -> None:
    """Where the model was built first and mmzero imported later."""
    import functools

    model = deformable(-1)
    model.num_cp = 1

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError('fairscale ran')

    checkpointed.__module__ = 'fairscale.nn.checkpoint.checkpoint_activations'
    model.layers[0].forward = functools.partial(checkpointed)
    assert list(check_same_step(model, run_deformable, plain=deformable(-1)).regions) == ['layers.0']


def test_function_of_fairscale_is_replaced() -> None:
    module, other = ModuleType('a'), ModuleType('b')
    module.checkpoint_wrapper = object()
    replace_wrapper(module)
    replace_wrapper(other)
    assert module.checkpoint_wrapper.__module__ == 'mmzero.patches.num_cp'
    assert not hasattr(other, 'checkpoint_wrapper')


USERS = ('deformable_detr_layers', 'detr_layers', 'grounding_dino_layers')
CODE = """
import sys
{imports}
assert ('mmdet' in sys.modules) is {eager}
import importlib
for name in {users}:
    module = importlib.import_module('mmdet.models.layers.transformer.' + name)
    assert module.checkpoint_wrapper.__module__ == 'mmzero.patches.num_cp', name
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ('imports', 'eager'),
    [('import mmzero', False), ('import mmzero.integrations.mmcv, mmdet.models\nimport mmzero.runner', True)],
)
def test_import_of_mmzero_is_enough(imports: str, eager: bool) -> None:
    """In either order, and without importing mmdet for it."""
    code = CODE.format(imports=imports, eager=eager, users=USERS)
    subprocess.run([sys.executable, '-c', code], check=True)


def test_all_users_of_fairscale_are_known() -> None:
    """A later mmdet may use it in another place."""
    from pathlib import Path

    import mmdet

    from mmzero.integrations.mmdet.num_cp import FOLDER

    root = Path(mmdet.__file__).parent
    users = [path for path in root.rglob('*.py') if 'fairscale' in path.read_text()]
    names = ['.'.join(path.relative_to(root.parent).with_suffix('').parts) for path in users]
    assert sorted(names) == [f'{FOLDER}.{name}' for name in USERS]
