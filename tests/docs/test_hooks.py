"""The page of hooks has a row for each that MMEngine and mmdet register, and cites tests that exist."""

import ast
import importlib.util
import re
from pathlib import Path

import mmengine.hooks  # noqa: F401
import pytest
from mmengine.registry import HOOKS

import mmzero  # noqa: F401  (mmdet's hooks import what mmcv-lite lacks)

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / 'docs/hooks.md').read_text(encoding='utf-8')
CITED = sorted(set(re.findall(r'`(tests/[\w/]+\.py)::(\w+)`', PAGE)))


def rows(package: str) -> dict[str, str]:
    """Rows of a package's table, by hook."""
    section = PAGE.split(f'\n## {package}\n')[1].split('\n## ')[0]
    found = {match[1]: match[0] for match in re.finditer(r'^\| `(\w+)` \|.*$', section, flags=re.MULTILINE)}
    return found


def registered(package: str) -> set[str]:
    """Hooks that a package itself registers, but for the base class, which does nothing."""
    registry = HOOKS if package == 'mmengine' else HOOKS.children[package]
    # Not those of its tests.
    home = 'mmengine.hooks.' if package == 'mmengine' else f'{package}.engine.hooks.'
    classes = {cls.__name__ for cls in registry.module_dict.values() if cls.__module__.startswith(home)}
    return classes - {'Hook'}


def test_every_hook_of_mmengine() -> None:
    assert set(rows('MMEngine')) == registered('mmengine')


@pytest.mark.skipif(importlib.util.find_spec('mmdet') is None, reason='needs mmdet')
def test_every_hook_of_mmdet() -> None:
    import mmdet.engine.hooks  # noqa: F401

    assert set(rows('mmdet')) == registered('mmdet')


@pytest.mark.parametrize('package', ['MMEngine', 'mmdet'])
def test_every_row_cites_a_test(package: str) -> None:
    assert [name for name, row in rows(package).items() if '::test_' not in row] == []


@pytest.mark.parametrize('file, name', CITED)
def test_cited_test_exists(file: str, name: str) -> None:
    defined = [node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert name in defined


def test_cases_name_their_hooks() -> None:
    """What a row says is tested by many cases names the hook in the file."""
    for package in ('MMEngine', 'mmdet'):
        for name, row in rows(package).items():
            files = {file for file, _ in re.findall(r'`(tests/[\w/]+\.py)::(\w+)`', row)}
            texts = ' '.join((ROOT / file).read_text() for file in files)
            assert name in texts or not files, f'{name} is in none of {sorted(files)}'
