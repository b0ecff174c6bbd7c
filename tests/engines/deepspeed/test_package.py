"""Without the deepspeed package, and with one that computes elsewhere."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mmzero.config import ZeroConfig
from mmzero.engines import build_engine
from mmzero.engines.deepspeed.package import ACCELERATOR_VARIABLE, import_deepspeed
from mmzero.errors import ConfigError


@pytest.fixture(autouse=True)
def _accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ACCELERATOR_VARIABLE, 'cpu')


def test_missing_package_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, 'deepspeed', None)
    wanted = r"engine: 'deepspeed' needs the package deepspeed, .* run pip install 'mmzero\[deepspeed\]'"
    with pytest.raises(ConfigError, match=wanted):
        build_engine(ZeroConfig(engine='deepspeed'))
    # Stage 0 is DDP under every engine, and needs nothing else.
    build_engine(ZeroConfig(engine='deepspeed', stage=0))


def test_a_package_that_misses_one_of_its_own_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'hjson'", name='hjson')

    monkeypatch.setattr('importlib.import_module', fail)
    with pytest.raises(ModuleNotFoundError, match='hjson'):
        import_deepspeed('cpu')


def test_other_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = ModuleType('deepspeed')
    package.accelerator = SimpleNamespace(get_accelerator=lambda: SimpleNamespace(device_name=lambda: 'xpu'))
    monkeypatch.setitem(sys.modules, 'deepspeed', package)
    with pytest.raises(ConfigError, match=r"computes on 'xpu', this rank on 'cpu'; set .* DS_ACCELERATOR=cpu"):
        import_deepspeed(torch.device('cpu').type)
