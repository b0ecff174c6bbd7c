"""Every shipped config loads, is short, and its policy fits its model."""

import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope

import mmzero  # noqa: F401
from mmzero._compat import parameters_on_meta
from mmzero.config import Faults, read_zero_config
from mmzero.policies import build_policy
from mmzero.registry import WRAP_POLICIES

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'
LEAVES = sorted(CONFIGS.glob('*.py'))
POLICIES = sorted((CONFIGS / 'wrap_policies').glob('*.py'))

# Units, and the most of the parameters that stay in the root: blocks hold most of a model; of a small one less than of
# Swin-L, and of a language model less than its embedding and its output weights.
EXPECTED = dict(
    dino_swin_l=({'SwinBlock', 'DeformableDetrTransformerDecoderLayer'}, 0.06),
    dino_swin_tiny=({'SwinBlock', 'DeformableDetrTransformerDecoderLayer'}, 0.3),
    llama_8b=({'LlamaDecoderLayer'}, 0.14),
)
NEEDS_TRANSFORMERS = pytest.mark.skipif(importlib.util.find_spec('transformers') is None, reason='needs transformers')


def leaf(path: Path) -> Any:
    return pytest.param(path, id=path.stem, marks=NEEDS_TRANSFORMERS if path.stem.startswith('llama') else ())


def plan_of(cfg: Config):
    with DefaultScope.overwrite_default_scope(cfg.default_scope), parameters_on_meta():
        model = MODELS.build(cfg.model)
    faults = Faults()
    fields = {key: value for key, value in cfg.model_wrapper_cfg.items() if key != 'type'}
    config = read_zero_config(fields, 'model_wrapper_cfg', faults)
    faults.raise_if_any()
    return build_policy(config.wrap_policy)(model)


@pytest.mark.parametrize('path', map(leaf, LEAVES))
def test_config(path: Path) -> None:
    cfg = Config.fromfile(path)
    assert cfg.runner_type == 'mmzero.ZeroRunner'
    assert str(cfg.model_wrapper_cfg.stage) == path.stem[-1]
    plan = plan_of(cfg)
    classes, share = next(found for start, found in EXPECTED.items() if path.stem.startswith(start))
    assert {unit.class_name for unit in plan.units} >= classes
    assert plan.root.numel < share * plan.numel


def test_every_policy_has_a_config() -> None:
    """One for each in the registry, and one with a policy of torch's; Not stands in that of AllOf."""
    text = ''.join(path.read_text() for path in POLICIES)
    named = [name for name in WRAP_POLICIES.module_dict if re.search(rf"'{name}'", text)]
    assert set(WRAP_POLICIES.module_dict) - set(named) == {'AnyOf'} and 'wrap_policy=[' in text
    assert 'size_based_auto_wrap_policy' in text


@pytest.mark.parametrize('path', POLICIES, ids=lambda path: path.stem)
def test_policy(path: Path) -> None:
    plan = plan_of(Config.fromfile(path))
    assert len(plan.units) >= 5 and plan.root.numel < 0.5 * plan.numel


@pytest.mark.parametrize('name', ['dino_swin_l_zero3', 'dino_swin_l_digits_zero3'])
def test_full_size_model(name: str) -> None:
    cfg = Config.fromfile(CONFIGS / f'{name}.py')
    assert 217e6 < plan_of(cfg).numel < 220e6


@NEEDS_TRANSFORMERS
def test_llama_has_the_sizes_of_llama_3_8b() -> None:
    assert plan_of(Config.fromfile(CONFIGS / 'llama_8b_zero3.py')).numel == 8_030_261_248


def test_overlays_are_short() -> None:
    assert all(len(path.read_text().splitlines()) <= 30 for path in (*LEAVES, *POLICIES))


@pytest.mark.parametrize('stage', [1, 2, 3])
def test_bases_serve_both_styles(stage: int, tmp_path: Path) -> None:
    shutil.copytree(CONFIGS / '_base_', tmp_path / '_base_')
    (tmp_path / 'old.py').write_text(
        f"_base_ = './_base_/zero{stage}.py'\nmodel_wrapper_cfg = dict(mesh=dict(replicate=2))\n"
    )
    (tmp_path / 'new.py').write_text(
        'from mmengine.config import read_base\n\n'
        f'with read_base():\n    from ._base_.zero{stage} import *\n\n'
        'model_wrapper_cfg.update(mesh=dict(replicate=2))\n'
    )
    old, new = (Config.fromfile(tmp_path / name) for name in ('old.py', 'new.py'))
    assert old.to_dict() == new.to_dict()
    assert new.model_wrapper_cfg == dict(type='ZeroModelWrapper', stage=stage, mesh=dict(replicate=2))
