"""The projects work as a user would use them."""

from pathlib import Path

from mmengine.config import Config
from mmengine.utils import import_modules_from_strings

from tests.configs.test_configs import plan_of

PROJECT = Path(__file__).resolve().parents[2] / 'projects' / 'custom_wrap_policy'


def test_custom_wrap_policy() -> None:
    """Frozen parts are one unit each, and what trains is cut into blocks."""
    cfg = Config.fromfile(PROJECT / 'dino_swin_tiny_digits_zero3.py')
    import_modules_from_strings(**cfg.custom_imports)
    plan = plan_of(cfg)
    names = [unit.name for unit in plan.units]
    assert 'backbone.stages.0' in names and 'backbone.patch_embed' in names
    assert not any(unit.trained_numel() for unit in plan.units if unit.name.startswith('backbone.stages.0'))
    assert not [name for name in names if name.startswith('backbone.stages.0.')] and 'decoder.layers.0' in names
    assert 'frozen, in one piece each: backbone.patch_embed, backbone.stages.0' in plan.notes[-1]
