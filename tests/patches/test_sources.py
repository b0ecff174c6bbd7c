"""Each class of the packages that calls torch's checkpoint has a patch: a later version with a new one is noticed."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from mmzero.patches import OwnBlock, OwnParts
from mmzero.patches.switch import SWITCHES
from mmzero.registry import CHECKPOINT_PATCHES

FUNCTIONS = ('checkpoint', 'checkpoint_seq', 'checkpoint_sequential')
# How many there were when this was written; fewer mean that the walk no longer finds them.
PACKAGES = dict(mmcv=1, mmdet=9, mmseg=11, mmpretrain=23, timm=80, transformers=2)
# Their models refuse to turn it on (supports_gradient_checkpointing).
WITHOUT = {'GroundingDinoDecoder', 'MMGroundingDinoDecoder'}
# What a block calls in its forward.
INNER = ('call_checkpoint_bottleneck',)


@dataclass(frozen=True)
class Caller:
    """A method that calls torch's checkpoint; what it recomputes is ``source``, as code."""

    node: ast.ClassDef
    method: str
    source: str


def callers(tree: ast.AST) -> Iterator[Caller]:
    """Find methods that call torch's checkpoint."""
    for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for method in (node for node in cls.body if isinstance(node, ast.FunctionDef)):
            for call in (node for node in ast.walk(method) if isinstance(node, ast.Call)):
                function = ast.unparse(call.func)
                if function.split('.')[-1] in FUNCTIONS and not function.startswith('self.'):
                    loops = [node for node in ast.walk(method) if isinstance(node, ast.For) and call in ast.walk(node)]
                    around = [text for text in (ast.unparse(loop.iter) for loop in loops) if 'range(' not in text]
                    source = ' '.join([*map(ast.unparse, call.args[:1]), *around])
                    yield Caller(cls, method.name, source)


def sources(package: str) -> Iterator[str]:
    """Read a package's sources, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f'{package} is not installed')
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).rglob('*.py')):
            if '.mim' not in path.parts:
                yield path.read_text()


def patch_of(package: str, node: ast.ClassDef) -> type | None:
    """The patch that a class gets by its name or that of a base which its source names."""
    for name in (node.name, *(ast.unparse(base).split('.')[-1].lstrip('_') for base in node.bases)):
        found = CHECKPOINT_PATCHES.module_dict.get(f'{package}.{name}') or CHECKPOINT_PATCHES.module_dict.get(name)
        if found is not None:
            return found
    return None


def fault(package: str, caller: Caller) -> str | None:
    """Say what a class lacks."""
    patch = patch_of(package, caller.node)
    if patch is None:
        return 'has no patch'
    if not any(switch in ast.unparse(caller.node) for switch in SWITCHES) and caller.node.name != 'PreTrainedModel':
        return f'has no switch of {SWITCHES}'
    if issubclass(patch, OwnParts):
        parts = [pattern.split('.')[0] for pattern in patch.parts]
        named = [name for name in re.findall(r'self\.(\w+)', caller.source) if parts]
        missed = [name for name in named if not any(fnmatchcase(name, part) for part in parts)]
        return f'recomputes {missed}, its patch {parts}' if missed else None
    if issubclass(patch, OwnBlock) and caller.method not in ('forward', *patch.methods, *INNER):
        return None if package == 'transformers' else f'recomputes in {caller.method}, which its patch does not know'
    return None


@pytest.mark.parametrize('package', PACKAGES)
def test_each_has_a_patch(package: str) -> None:
    calling = [text for text in sources(package) if any(f'{function}(' in text for function in FUNCTIONS)]
    found = [caller for text in calling for caller in callers(ast.parse(text)) if caller.node.name not in WITHOUT]
    faults = {
        f'{caller.node.name}.{caller.method} {fault(package, caller)}' for caller in found if fault(package, caller)
    }
    assert not faults
    assert len({caller.node.name for caller in found}) >= PACKAGES[package]


def test_names_of_layers_of_transformers_are_not_taken() -> None:
    """A patch by a name that is common would come before that of their base."""
    layer = re.compile(r'^class (\w+)\(.*GradientCheckpointingLayer', re.MULTILINE)
    found = {name for text in sources('transformers') for name in layer.findall(text)}
    assert len(found) > 100
    assert not found & set(CHECKPOINT_PATCHES.module_dict)


CODE = """
class {name}(nn.Module):
    def {method}(self, x):
        for block in self.{parts}:
            x = checkpoint(block, x) if self.with_cp else block(x)
"""


@pytest.mark.parametrize(
    ('name', 'method', 'parts', 'said'),
    [
        ('NewBlock', 'forward', 'blocks', 'has no patch'),
        ('SwinBlock', 'other', 'blocks', 'recomputes in other'),
        ('RepLKNetStage', 'forward', 'others', r"recomputes \['others'\]"),
    ],
)
def test_the_walk_finds_faults(name: str, method: str, parts: str, said: str) -> None:
    (caller,) = callers(ast.parse(CODE.format(name=name, method=method, parts=parts)))
    assert re.match(said, fault('mmdet', caller) or '')
