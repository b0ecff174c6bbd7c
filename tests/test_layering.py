"""Imports inside mmzero go one way: every import of every file is held against the design."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_PACKAGE = 'mmzero'
_REPO_ROOT = Path(__file__).resolve().parents[1]

# What a room may import, besides itself. Left of the design's arrows comes first here.
_BASE = frozenset({'registry', 'errors', 'version', '_compat'})
_CONFIG = _BASE | {'config'}
_PLAN = _CONFIG | {'policies', 'patches'}
_ENGINES = _PLAN | {'engines'}
_WRAPPERS = _ENGINES | {'checkpoint', 'planner', 'wrappers'}
_ALLOWED = {
    **dict.fromkeys(_BASE, _BASE),
    'config': _CONFIG,
    # The two do not know of each other.
    'policies': _CONFIG,
    'patches': _CONFIG,
    'engines': _ENGINES,
    'checkpoint': _ENGINES,
    'planner': _ENGINES,
    'wrappers': _WRAPPERS,
    'hooks': _WRAPPERS,
    'runner': _WRAPPERS | {'hooks'},
    'analysis': _WRAPPERS | {'hooks', 'runner', 'analysis'},
}
# Integrations have no place in the order: they may import any room.
_INTEGRATIONS = 'integrations'

# Packages that mmzero works without, and the folders that may import them.
_OPTIONAL_PACKAGES = {
    'mmcv': ('integrations',),
    'mmdet': ('integrations',),
    'mmpretrain': ('integrations',),
    'mmseg': ('integrations',),
    'transformers': ('integrations',),
    'peft': ('integrations',),
    'safetensors': ('integrations',),
    'timm': ('integrations',),
    'deepspeed': ('integrations', 'engines.deepspeed'),
}


@dataclass(frozen=True)
class _Import:
    """One imported name, with relative imports resolved: ``from ..a import b`` is `mmzero.a.b`."""

    target: str
    line: int
    lazy: bool

    def is_of(self, package: str) -> bool:
        return self.target == package or self.target.startswith(f'{package}.')


def _imports_of(tree: ast.AST, package: str, lazy: bool = False) -> Iterator[_Import]:
    """Yield all imports below a node.

    Args:
        tree (ast.AST): The node.
        package (str): The dotted package that relative imports start from.
        lazy (bool): Whether the node lies inside a function.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _Import(alias.name, node.lineno, lazy)
        elif isinstance(node, ast.ImportFrom):
            module = _resolve(node, package)
            for alias in node.names:
                yield _Import(f'{module}.{alias.name}', node.lineno, lazy)
        elif _is_torch_distributed(node):
            yield _Import('torch.distributed', node.lineno, lazy)
        else:
            in_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _imports_of(node, package, lazy or in_function)


def _resolve(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ''
    parents = package.split('.')
    base = parents[: len(parents) - node.level + 1]
    return '.'.join([*base, node.module] if node.module else base)


def _is_torch_distributed(node: ast.AST) -> bool:
    """`import torch` loads torch.distributed as well, so using it takes no import of its own."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr == 'distributed'
        and isinstance(node.value, ast.Name)
        and node.value.id == 'torch'
    )


def _faults_of_file(path: Path, root: Path) -> list[str]:
    parts = path.relative_to(root).with_suffix('').parts
    is_package = parts[-1] == '__init__'
    module = parts[:-1] if is_package else parts
    if module == (_PACKAGE,):
        return []
    package = '.'.join(module if is_package else module[:-1])
    tree = ast.parse(path.read_text(encoding='utf-8'), str(path))
    faults = []
    for item in _imports_of(tree, package):
        fault = _fault('.'.join(module[1:]), item)
        if fault is not None:
            faults.append(f'{path.relative_to(root)}:{item.line}: {fault}')
    return faults


def _fault(module: str, item: _Import) -> str | None:
    """Say what is wrong with one import of the module ``mmzero.<module>``, if anything is."""
    room = module.split('.')[0]
    if room not in _ALLOWED and room != _INTEGRATIONS:
        return f'room {room!r} is not in the table of this test; give it a place in the design'
    if item.is_of('tools'):
        return f'{room} must not import tools'
    if room == 'policies' and item.is_of('torch.distributed'):
        return 'policies are pure: they must not use torch.distributed'
    if item.is_of(_PACKAGE):
        return _inner_fault(room, item)
    folders = _OPTIONAL_PACKAGES.get(item.target.split('.')[0])
    if folders and not any(f'{module}.'.startswith(f'{folder}.') for folder in folders):
        return f'only {" and ".join(folders)} may import {item.target}'
    return None


def _inner_fault(room: str, item: _Import) -> str | None:
    target = (item.target.split('.') + [''])[1]
    if target == _INTEGRATIONS:
        if room == _INTEGRATIONS or item.lazy:
            return None
        return f'{room} may import integrations only inside a function'
    if target not in _ALLOWED:
        return f'import {item.target} from its own room, not from the top of {_PACKAGE}'
    if room == _INTEGRATIONS or room == target or target in _ALLOWED[room]:
        return None
    return f'{room} must not import {target}'


def _faults_of_tree(root: Path) -> list[str]:
    files = sorted((root / _PACKAGE).rglob('*.py'))
    return [fault for path in files for fault in _faults_of_file(path, root)]


def test_imports_go_one_way():
    faults = _faults_of_tree(_REPO_ROOT)
    assert not faults, '\n' + '\n'.join(faults)


def test_the_tree_is_found():
    assert (_REPO_ROOT / _PACKAGE / 'version.py').is_file()


# --- the checker itself


@pytest.fixture
def check(tmp_path):
    """Write one file into a tree of its own and return the faults found there."""

    def write_and_check(path: str, source: str) -> list[str]:
        file = tmp_path / _PACKAGE / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
        return _faults_of_tree(tmp_path)

    return write_and_check


@pytest.mark.parametrize(
    'path, source',
    [
        ('errors.py', 'from mmzero.config import ZeroConfig'),
        ('config/a.py', 'import mmzero.policies.plan'),
        ('policies/a.py', 'from mmzero.patches import apply'),
        ('patches/a.py', 'from ..policies.plan import WrapPlan'),
        ('policies/a.py', 'from .. import engines'),
        ('engines/base.py', 'from ..checkpoint import save'),
        ('engines/fsdp2/a.py', 'from ...planner.memory import peak'),
        ('engines/fsdp2/__init__.py', 'from ...wrappers import optim'),
        ('checkpoint/a.py', 'from mmzero import planner'),
        ('planner/a.py', 'from mmzero import checkpoint'),
        ('wrappers/a.py', 'def f():\n    from mmzero.hooks import x'),
        ('wrappers/a.py', 'class A:\n    async def f(self):\n        import mmzero.runner'),
        ('hooks/a.py', 'if TYPE_CHECKING:\n    from mmzero.runner import ZeroRunner'),
        ('hooks/a.py', 'try:\n    pass\nfinally:\n    from ..runner import ZeroRunner'),
        ('runner/a.py', 'from tools.train import main'),
        ('runner/a.py', 'from mmzero import ZeroRunner'),
        ('runner/a.py', 'import mmzero'),
        ('runner/a.py', 'from mmzero.integrations.mmcv import install_stand_in'),
        ('runner/a.py', 'import mmdet.apis'),
        ('runner/a.py', 'def f():\n    from transformers import AutoModel'),
        ('engines/fsdp2/a.py', 'import deepspeed'),
        ('engines/deepspeed_old.py', 'import deepspeed'),
        ('policies/a.py', 'import torch.distributed as dist'),
        ('policies/a.py', 'from torch import distributed'),
        ('policies/a.py', 'from torch.distributed.tensor import DTensor'),
        ('policies/a.py', 'import torch\nrank = torch.distributed.get_rank()'),
        ('utils/a.py', 'from mmzero.errors import ConfigError'),
    ],
)
def test_a_wrong_arrow_is_caught(check, path, source):
    (fault,) = check(path, source)
    assert fault.startswith(f'mmzero/{path}:')


@pytest.mark.parametrize(
    'path, source',
    [
        ('__init__.py', 'from .runner import ZeroRunner\nfrom .integrations.mmcv import x'),
        ('errors.py', 'from .registry import near_names'),
        ('policies/a.py', 'import torch\nfrom ..config import ZeroConfig\nfrom .plan import Unit'),
        ('policies/a.py', 'import torch.distributed_extras'),
        ('engines/ddp.py', 'import torch.distributed\nfrom ..policies import WrapPlan'),
        ('engines/deepspeed/a.py', 'import deepspeed\nfrom ..base import Engine'),
        ('checkpoint/a.py', 'from ..engines import engine_for'),
        ('planner/a.py', 'from ..engines.fsdp2 import rules'),
        ('runner/a.py', 'from ..hooks import ZeroCheckpointHook\nfrom .. import _compat'),
        ('runner/a.py', 'def f():\n    from ..integrations import mmcv'),
        ('runner/a.py', 'import mmcv_like, timm_like'),
        ('integrations/mmcv/a.py', 'import mmcv, deepspeed\nfrom ...runner import ZeroRunner'),
    ],
)
def test_a_right_arrow_passes(check, path, source):
    assert check(path, source) == []


def test_every_fault_is_reported(check):
    check('config/a.py', 'import mmdet\n\nfrom ..runner import x, y')
    faults = check('errors.py', 'from .config import z')
    assert [fault.split(': ')[0] for fault in faults] == [
        'mmzero/config/a.py:1',
        'mmzero/config/a.py:3',
        'mmzero/config/a.py:3',
        'mmzero/errors.py:1',
    ]
