"""Changing what a hook does after it was built, whatever its class."""

from typing import Any, TypeVar

from mmengine.hooks import Hook

T = TypeVar('T', bound=Hook)


def put_before(hook: Hook, cls: type[T]) -> T:
    """Let a class come first among the bases of a hook, which stays the same object.

    Args:
        hook (Hook): The hook; its class may be a project's.
        cls (type): The class. A hook that has it already stays as it is.

    Returns:
        Hook: The same object.
    """
    if not isinstance(hook, cls):
        changed: Any = hook
        kind = type(hook)
        changed.__class__ = type(kind.__name__, (cls, kind), {'__module__': kind.__module__})
    return hook
