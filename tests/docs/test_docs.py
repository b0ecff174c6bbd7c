"""What the documentation points at exists, and its tables and pictures say what the code does."""

import ast
import functools
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.test_layering import _ALLOWED, _BASE, _INTEGRATIONS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *sorted((ROOT / 'docs').glob('*.md'))]
ROAD = ROOT / 'docs/the_road.md'
PICTURES = ('the_rooms.svg', 'the_way_of_the_data.svg')
SVG = '{http://www.w3.org/2000/svg}'

each_page = pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding='utf-8'))


def functions(node: ast.AST) -> set[str]:
    return {child.name for child in ast.walk(node) if isinstance(child, ast.FunctionDef)}


def constant(path: str, name: str) -> Any:
    """A literal that a file assigns, without importing the file."""
    for node in tree(ROOT / path).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:  # type: ignore[attr-defined]
            return ast.literal_eval(node.value)
    raise AssertionError(f'{path} has no {name}')


def code_spans(page: Path) -> list[str]:
    text = re.sub(r'```.*?```', '', page.read_text(encoding='utf-8'), flags=re.DOTALL)
    return re.findall(r'`([^`\n]+)`', text)


def table(page: Path, heading: str, column: int = 0) -> list[str]:
    """Cells of one column of the first table below a heading, without backticks."""
    section = page.read_text(encoding='utf-8').split(f'\n## {heading}\n')[1].split('\n## ')[0]
    rows = [line for line in section.splitlines() if line.startswith('|')][2:]
    return [row.strip('|').split('|')[column].strip().strip('`') for row in rows]


def marks(picture: str, attribute: str) -> Iterator[str]:
    for element in ElementTree.parse(ROOT / 'docs' / picture).iter():
        if attribute in element.attrib:
            yield element.attrib[attribute]


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r'```.*?```', '', page.read_text(encoding='utf-8'), flags=re.DOTALL)
    targets = [target.split('#')[0] for target in re.findall(r'\]\(([^)\s]+)\)', text) if '://' not in target]
    lost = [target for target in targets if target and not (page.parent / target).exists()]
    assert not lost


@each_page
def test_files_and_tests_that_are_cited_exist(page: Path) -> None:
    lost = []
    for span in code_spans(page):
        path, _, name = span.partition('::')
        if not re.fullmatch(r'(mmzero|tests|tools|configs|docs)/[\w./-]*(\.\w+|/)', path) or '...' in path:
            continue
        # A folder that is still to come may be named, a file not.
        is_there = (ROOT / path).exists() or (path.endswith('/') and page != ROAD)
        if not is_there or (name and name.split('[')[0] not in functions(tree(ROOT / path))):
            lost.append(span)
    assert not lost


def test_the_road_names_what_exists() -> None:
    here = functions(tree(ROOT / 'tests/distributed/test_mmengine_order.py'))
    classes = {
        node.name: functions(node)
        for path in (ROOT / 'mmzero').rglob('*.py')
        for node in tree(path).body
        if isinstance(node, ast.ClassDef)
    }
    spans = code_spans(ROAD)
    tests = [span for span in spans if re.fullmatch(r'test_\w+', span)]
    methods = [match.groups() for span in spans if (match := re.match(r'(Zero\w+)\.(\w+)', span))]
    promises = [cell.split('(')[0] for cell in table(ROAD, 'One iteration', 1) if cell]
    assert tests and methods and promises
    assert set(tests) <= here
    assert all(method in classes.get(cls, ()) for cls, method in methods), methods
    assert set(promises[: promises.index('step') + 1]) <= classes['Engine']


def test_the_order_is_that_of_the_tests() -> None:
    order = constant('tests/runner/test_order.py', 'ORDER')
    assert table(ROAD, 'The order under ZeroRunner')[: len(order)] == order
    theirs = constant('tests/distributed/test_mmengine_order.py', 'MMENGINE_ORDER')
    assert table(ROAD, "How MMEngine's Runner lives") == theirs
    drawn = [event for events in marks('the_way_of_the_data.svg', 'data-events') for event in events.split(', ')]
    assert drawn == order


def test_the_rooms_are_those_of_the_layering() -> None:
    rooms = {*_ALLOWED, _INTEGRATIONS}
    for found in (table(ROAD, 'The rooms'), list(marks('the_rooms.svg', 'data-room'))):
        assert sorted(found) == sorted(rooms)


def test_the_arrows_are_those_of_the_layering() -> None:
    """What leads to a room along the drawn arrows is what the room may import."""
    arrows = list(zip(marks('the_rooms.svg', 'data-from'), marks('the_rooms.svg', 'data-to'), strict=True))
    assert ('all', _INTEGRATIONS) in arrows and (_INTEGRATIONS, 'all') in arrows

    def leads_to(room: str) -> set[str]:
        sources = {source for start, end in arrows if end == room for source in start.split()}
        return sources.union(*(leads_to(source) for source in sources))

    # Those at the top share a box, which says that they may use each other.
    for room in _ALLOWED.keys() - _BASE:
        assert leads_to(room) == _ALLOWED[room] - {room}, room
    assert all(leads_to(room) == set() for room in _BASE)


@pytest.mark.parametrize('picture', PICTURES)
def test_pictures_can_be_read_on_any_background(picture: str) -> None:
    root = ElementTree.parse(ROOT / 'docs' / picture).getroot()
    ground = root.find(f'{SVG}rect')
    assert ground is not None and ground.get('fill', '').startswith('#')
    assert (ground.get('width'), ground.get('height')) == (root.get('width'), root.get('height'))
    width, height = float(root.attrib['width']), float(root.attrib['height'])
    # Pages show pictures at most this wide, and shrink the text of wider ones.
    assert width <= 880
    for text in root.iter(f'{SVG}text'):
        size, x, y = (float(text.attrib[name]) for name in ('font-size', 'x', 'y'))
        half = 0.65 * size * len(text.text or '') / 2
        middle = x if text.get('text-anchor') == 'middle' else x + half
        assert size >= 14 and half <= middle <= width - half and size <= y <= height, text.text
