"""Fields of ``optim_wrapper`` about single steps, besides MMEngine's own."""

from typing import Any

from mmzero.config.reader import module_patterns

DEFAULT_MAX_SKIPS = 20
"""More than a dynamic scale that starts at 2**16 takes to come down to 1."""

GROUPS = 'groups'


def read_max_skips(value: Any) -> int | None:
    """Read ``max_skips``.

    Args:
        value (int, optional): Steps that may be skipped in a row; None: none is skipped but in float16.

    Returns:
        int or None: The value.

    Raises:
        ValueError: If it is neither; says what is allowed.
    """
    if value is None or type(value) is int and value >= 0:
        return value
    raise ValueError('expected None or an integer of 0 or more')


def read_grad_norms(value: Any) -> tuple[str, ...]:
    """Read ``grad_norms``.

    Args:
        value (str or Sequence[str], optional): 'groups' for the optimizer's groups, or patterns on names of modules
            and parameters; None for no norms of parts.

    Returns:
        tuple[str, ...]: The patterns; ``('groups',)`` for groups.

    Raises:
        ValueError: If it is none of these; says what is allowed.
    """
    try:
        return () if value is None else module_patterns(value)
    except ValueError:
        raise ValueError(
            "expected 'groups' for the optimizer's groups, or a list of patterns, such as ['backbone', 'neck']"
        ) from None
