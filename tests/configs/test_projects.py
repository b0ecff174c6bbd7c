"""The projects work as a user would use them."""

from pathlib import Path

from mmengine.config import Config
from mmengine.utils import import_modules_from_strings

from tests.configs.test_configs import plan_of

PROJECT = Path(__file__).resolve().parents[2] / 'projects' / 'custom_wrap_policy'


def test_custom_wrap_policy() -> None:
    """Frozen parts are one unit each, and what trains is cut into blocks."""
    cfg = Config.fromfile(PROJECT / 'dino_r18_tiny_digits_zero3.py')
    import_modules_from_strings(**cfg.custom_imports)
    plan = plan_of(cfg)
    units = {unit.name: unit for unit in plan.units}
    frozen = {'backbone.layer1', 'backbone.layer2'}
    assert frozen < units.keys() and not any(units[name].trained_numel() for name in frozen)
    assert not [name for name in units if name.startswith('backbone.layer1.')] and 'backbone.layer3.1' in units
    assert 'backbone.layer1, backbone.layer2' in plan.notes[-1]
