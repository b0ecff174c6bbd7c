"""A reader for a wrap policy as a config gives it."""

from collections.abc import Mapping
from typing import Any


def wrap_policy(value: Any) -> Any:
    """A reader for a policy's name, its dict, a list of policies, or a function."""
    if value is None or callable(value) or isinstance(value, str) and value or hasattr(value, '_run_policy'):
        return value  # the last are torch's own
    if isinstance(value, (list, tuple)) and value:
        return [wrap_policy(item) for item in value]
    if isinstance(value, Mapping) and (
        isinstance(value.get('type'), str) and value['type'] or callable(value.get('type'))
    ):
        return value
    raise ValueError("expected a policy's name, or a dict with type, such as dict(type='ModuleClassPolicy', ...)")
