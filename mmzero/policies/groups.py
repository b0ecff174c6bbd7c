"""Alike units as one, with a name for all of them."""

from collections.abc import Sequence

from mmzero.policies.figures import UnitFigures


def alike(units: Sequence[UnitFigures]) -> list[list[UnitFigures]]:
    """Group units of one class with the same parameters and rules, wherever they lie in the model.

    Args:
        units (Sequence[UnitFigures]): The units.

    Returns:
        list[list[UnitFigures]]: The groups, in the order of their first units.
    """
    groups: dict[tuple, list[UnitFigures]] = {}
    for item in units:
        unit = item.unit
        key = (unit.class_name, unit.shapes, unit.itemsizes, unit.trainable, unit.rules, unit.compiled, item.dtypes)
        groups.setdefault(key, []).append(item)
    return list(groups.values())


def common_name(names: Sequence[str]) -> str:
    """Write several paths as one: ``layers.0`` and ``layers.1`` are ``layers.0-1``.

    Args:
        names (Sequence[str]): Paths of modules.

    Returns:
        str: Numbers that differ as ranges or lists, other parts that differ as ``*``; where paths have different
        lengths, the first and ``...``.
    """
    paths = [name.split('.') for name in names]
    if len({len(path) for path in paths}) > 1:
        return f'{names[0]}, ...'
    return '.'.join(_segment(list(dict.fromkeys(parts))) for parts in zip(*paths, strict=True))


def _segment(parts: list[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    if not all(part.isdecimal() for part in parts):
        return '*'
    numbers = sorted(int(part) for part in parts)
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f'{numbers[0]}-{numbers[-1]}'
    return ','.join(map(str, numbers)) if len(numbers) <= 4 else '*'
