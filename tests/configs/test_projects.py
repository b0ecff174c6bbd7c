"""The projects work as a user would use them."""

from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from mmengine.utils import import_modules_from_strings

from mmzero.config import CheckpointingConfig
from mmzero.runner import build_runner
from tests.configs.test_configs import plan_of
from tests.patches.families import check_same_step

PROJECTS = Path(__file__).resolve().parents[2] / 'projects'


def test_custom_wrap_policy() -> None:
    """Frozen parts are one unit each, and what trains is cut into blocks."""
    cfg = Config.fromfile(PROJECTS / 'custom_wrap_policy' / 'dino_r18_tiny_digits_zero3.py')
    import_modules_from_strings(**cfg.custom_imports)
    plan = plan_of(cfg)
    units = {unit.name: unit for unit in plan.units}
    frozen = {'backbone.layer1', 'backbone.layer2'}
    assert frozen < units.keys() and not any(units[name].trained_numel() for name in frozen)
    assert not [name for name in units if name.startswith('backbone.layer1.')] and 'backbone.layer3.1' in units
    assert 'backbone.layer1, backbone.layer2' in plan.notes[-1]


def test_custom_checkpoint_patch() -> None:
    """Its blocks are found by their own option, and what they note is noted once."""
    cfg = Config.fromfile(PROJECTS / 'custom_checkpoint_patch' / 'dino_low_memory_tiny_digits_zero3.py')
    import_modules_from_strings(**cfg.custom_imports)
    assert plan_of(cfg).units
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        model = MODELS.build(cfg.model.backbone).train()
        plain = MODELS.build(dict(cfg.model.backbone, low_memory=False)).train()
    plain.load_state_dict(model.state_dict())
    applied = check_same_step(model, lambda model: model(torch.randn(2, 3, 32, 32)), plain=plain)
    assert list(applied.regions) == [f'stages.{stage}.{block}.layers' for stage in (0, 1) for block in (0, 1)]
    assert len(model.means) == 4
    applied.undo()
    whole = CheckpointingConfig(modules=('stages.0.0',))
    assert 'stages.0.0' in check_same_step(model, lambda model: model(torch.randn(2, 3, 32, 32)), whole, plain).regions


def test_gan(group: None, tmp_path: Path) -> None:
    """Both networks are sharded by themselves and move."""
    cfg = Config.fromfile(PROJECTS / 'gan' / 'vector_gan_zero3.py')
    import_modules_from_strings(**cfg.custom_imports)
    cfg.work_dir, cfg.experiment_name, cfg.log_level = str(tmp_path), 'gan', 'ERROR'
    runner = build_runner(cfg)
    runner.train()
    assert [unit.name for unit in runner.model.plan.units if unit.separate] == ['generator', 'discriminator']
    saved = torch.load(tmp_path / 'epoch_2.pth', weights_only=True)
    assert saved['optimizer'].keys() == {'generator', 'discriminator'}
    first = torch.load(tmp_path / 'epoch_1.pth', weights_only=True)['state_dict']
    assert not [name for name, value in saved['state_dict'].items() if torch.equal(value, first[name])]
