"""Changing what a hook or a loader does after it was built, whatever its class."""

from typing import TypeVar

T = TypeVar('T')


def put_before(built: object, cls: type[T]) -> T:
    """Let a class come first among the bases of an object, which stays the same.

    Args:
        built (object): A hook or a loader; its class may be a project's.
        cls (type): The class. An object that has it already stays as it is.

    Returns:
        object: The same object.
    """
    if not isinstance(built, cls):
        kind = type(built)
        built.__class__ = type(kind.__name__, (cls, kind), {'__module__': kind.__module__})
    return built  # type: ignore[return-value]
