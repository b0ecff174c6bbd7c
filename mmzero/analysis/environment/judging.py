"""A part of mmzero, and what is collected about it."""

import platform
from dataclasses import dataclass, field
from typing import Any

Facts = dict[str, dict[str, Any]]
"""By the name of the probe what it has found; ``{'error': ...}`` where it failed."""


@dataclass(frozen=True)
class Part:
    """A part of mmzero.

    Args:
        name (str): What it is.
        missing (tuple[str, ...]): What it lacks, each with what to do; it works where there is none.
        remarks (tuple[str, ...]): What may be slower or smaller than it could.
    """

    name: str
    missing: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def works(self) -> bool:
        """Whether it does."""
        return not self.missing


@dataclass
class Judge:
    """Collects what a part lacks."""

    facts: Facts
    missing: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def get(self, probe: str, name: str, default: Any = None) -> Any:
        """A fact; the default where its probe failed."""
        return self.facts.get(probe, {}).get(name, default)

    def wants(self, *packages: str) -> None:
        """Look at packages and their versions."""
        for name in packages:
            found = self.get('packages', name, {})
            wanted = found.get('wanted') or ''
            advice = _INSTALL.get(name, f"pip install '{name}{wanted}'")
            if not found.get('version'):
                self.missing.append(f'{name} is missing: {advice}')
            elif found.get('fits') is False:
                self.missing.append(f'{name} {found["version"]} does not fit {wanted}: {advice}')

    def wants_core(self) -> None:
        """What every part stands on."""
        self.wants('torch', 'mmengine', 'addict', 'yapf', 'setuptools')
        if 'error' in self.facts.get('torch', {}) and self.get('packages', 'torch', {}).get('version'):
            self.missing.append(f'torch cannot be imported: {self.facts["torch"]["error"]}')
        if _python() < (3, 10):
            self.missing.append(f'Python {platform.python_version()}: use 3.10 or newer')

    def part(self, name: str) -> Part:
        """What was found."""
        return Part(name, tuple(self.missing), tuple(self.remarks))


def _python() -> tuple[int, ...]:
    return tuple(int(item) for item in platform.python_version_tuple()[:2])


_DET = "pip install -e '.[det]'"
_INSTALL = {
    'mmdet': _DET,
    'mmcv': _DET,
    'transformers': "pip install -e '.[hf]'",
    'peft': "pip install -e '.[peft]'",
    'safetensors': "pip install -e '.[peft]'",
    'deepspeed': "pip install -e '.[deepspeed]'",
    'mmseg': 'pip install mmsegmentation',
    'torch': "pip install 'torch>=2.11', from the index of the build that you want",
    'setuptools': "pip install 'setuptools<82', whose pkg_resources MMEngine reads",
}
