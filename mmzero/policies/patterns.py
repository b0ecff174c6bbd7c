"""Patterns on qualified names, segment by segment.

``*`` stands for any part of one segment and ``**`` for any number of segments: ``backbone.layers.*`` names the layers
and not what is in them, ``**.norm*`` every module anywhere whose own name begins with norm.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern names something.

    Args:
        pattern (str): Segments parted by dots, each with the wildcards of :mod:`fnmatch`, or ``**``.
        name (str): A qualified name.

    Returns:
        bool: Whether it does, as a whole.
    """
    return _matches(pattern.split('.'), name.split('.'))


def matches_or_holds(pattern: str, name: str) -> bool:
    """Whether a pattern names something, or a module above it.

    Args:
        pattern (str): As in :func:`matches`.
        name (str): A qualified name.

    Returns:
        bool: Whether it does: ``backbone`` and ``backbone.*`` hold ``backbone.layers.0``.
    """
    parts, wanted = name.split('.'), pattern.split('.')
    return any(_matches(wanted, parts[:end]) for end in range(1, len(parts) + 1))


def without_match(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Which patterns name none of some names, nor anything above them.

    Args:
        patterns (Iterable[str]): The patterns.
        names (Iterable[str]): The names.

    Returns:
        list[str]: Those patterns.
    """
    names = list(names)
    return [pattern for pattern in patterns if not any(matches_or_holds(pattern, name) for name in names)]


def _matches(wanted: Sequence[str], parts: Sequence[str]) -> bool:
    if not wanted:
        return not parts
    if wanted[0] == '**':
        return any(_matches(wanted[1:], parts[start:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], wanted[0]) and _matches(wanted[1:], parts[1:])
