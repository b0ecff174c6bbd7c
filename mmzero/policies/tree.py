"""The plan as a tree: where in the model its units lie, and what stays in the root."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from mmzero.policies.figures import PlanFigures, UnitFigures
from mmzero.policies.groups import alike, common_name
from mmzero.policies.table import mib, rules_text

# A unit, or the elements of a parameter that stays in the root, by path, in the order of registration.
_Items = dict[str, UnitFigures | int]


@dataclass(frozen=True)
class _Node:
    """A module that is a unit, holds units, or holds parameters of the root.

    Args:
        title (str): Its path below its parent's.
        figures (tuple[UnitFigures, ...]): The units that it stands for; none where it is no unit.
        left (int): Elements in it that stay in the root.
        children (tuple[_Node, ...]): The modules in it.
    """

    title: str
    figures: tuple[UnitFigures, ...]
    left: int
    children: tuple['_Node', ...] = ()


def plan_tree(figures: PlanFigures) -> str:
    """Draw a plan as a tree of the model's modules, alike siblings as one.

    Args:
        figures (PlanFigures): The plan and its bytes.

    Returns:
        str: A line per unit, or group of alike ones, and per module on the way, in the order of registration.
    """
    root = figures.root
    found: list[tuple[int, str, UnitFigures | int]] = [
        (min(item.unit.places, default=-1), item.unit.name, item) for item in figures.units[:-1]
    ]
    found += zip(root.unit.places, root.unit.params, map(prod, root.unit.shapes), strict=True)
    items = {name: item for _, name, item in sorted(found, key=lambda entry: entry[0])}
    return '\n'.join([f'(root) [{root.unit.class_name}]: {_sizes(root)}', *_lines(_children('', items))])


def _children(path: str, items: _Items) -> tuple[_Node, ...]:
    depth = path.count('.') + 2 if path else 1
    below: dict[str, _Items] = {}
    for name, item in items.items():
        if name != path:
            below.setdefault('.'.join(name.split('.')[:depth]), {})[name] = item
    alone = [next(iter(inside.values())) for name, inside in below.items() if list(inside) == [name]]
    leaves = [item for item in alone if isinstance(item, UnitFigures)]
    groups = {group[0].unit.name: group for group in alike(leaves)}
    followers = {item.unit.name for group in groups.values() for item in group[1:]}
    return tuple(
        _node(path, name, groups.get(name, ()), inside) for name, inside in below.items() if name not in followers
    )


def _node(path: str, name: str, group: Sequence[UnitFigures], items: _Items) -> _Node:
    title = common_name([item.unit.name for item in group] or [name]).removeprefix(f'{path}.')
    if group:
        return _Node(title, tuple(group), 0)
    itself = items.get(name)
    figures = (itself,) if isinstance(itself, UnitFigures) else ()
    left = sum(item for item in items.values() if isinstance(item, int))
    holds_units = any(isinstance(item, UnitFigures) for below, item in items.items() if below != name)
    children = _children(name, items) if holds_units else ()
    if len(children) == 1 and not figures and not left:
        (only,) = children
        return _Node(f'{title}.{only.title}', only.figures, only.left, only.children)
    return _Node(title, figures, left, children)


def _lines(nodes: Sequence[_Node], indent: str = '') -> Iterator[str]:
    for node in nodes:
        is_last = node is nodes[-1]
        yield f'{indent}{"`-" if is_last else "|-"} {_text(node)}'
        yield from _lines(node.children, indent + ('   ' if is_last else '|  '))


def _text(node: _Node) -> str:
    if not node.figures:
        return f'{node.title}: {node.left:,} in the root' if node.left else node.title
    item = node.figures[0]
    times = f' x {len(node.figures)}' if len(node.figures) > 1 else ''
    rules = rules_text(item.unit.rules)
    return f'{node.title} [{item.unit.class_name}{times}]: {_sizes(item)}{"; " if rules else ""}{rules}'


def _sizes(item: UnitFigures) -> str:
    dtypes = f' in {"+".join(item.dtypes)}' if item.dtypes else ''
    return f'{item.unit.numel:,} parameters, {mib(item.gathered_bytes)} MiB{dtypes}'
