"""The page of hazards cites tests that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / 'docs/hazards.md').read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith('| ') and not line.startswith('| hazard')]
CITED = sorted(set(re.findall(r'`(tests/[\w/]+\.py)::(\w+)`', PAGE)))


@pytest.mark.parametrize('file, name', CITED)
def test_cited_test_exists(file: str, name: str) -> None:
    defined = [node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert name in defined


def test_every_hazard_cites_a_test() -> None:
    assert len(ROWS) >= 14
    assert not [row for row in ROWS if '::test_' not in row]
