"""Parts of a model whose gradient norms are logged by themselves."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from mmzero.config.step import GROUPS
from mmzero.errors import near_names
from mmzero.policies import matches_or_holds

MOST_GROUPS = 30
"""More norms by mere numbers tell nobody anything."""


def parts_of(
    named: Iterable[tuple[str, nn.Parameter]], groups: Sequence[Mapping[str, Any]], wanted: Sequence[str]
) -> dict[str, list[nn.Parameter]]:
    """Find the parameters of each part.

    Args:
        named (Iterable[tuple[str, nn.Parameter]]): The model's parameters.
        groups (Sequence[Mapping[str, Any]]): The optimizer's groups.
        wanted (Sequence[str]): Patterns, or ``('groups',)``.

    Returns:
        dict[str, list[nn.Parameter]]: Parameters by the pattern, or by the group's ``group_name`` or number;
            frozen ones too, which a hook may unfreeze.

    Raises:
        ValueError: If a pattern names nothing that trains; lists near names. If groups are many and have no names.
    """
    if tuple(wanted) == (GROUPS,):
        if len(groups) > MOST_GROUPS and not any('group_name' in group for group in groups):
            raise ValueError(
                f"got 'groups', and there are {len(groups)} without names, as paramwise_cfg makes one per parameter; "
                "give a list of patterns, such as ['backbone', 'neck']"
            )
        return {str(group.get('group_name', index)): [*group['params']] for index, group in enumerate(groups)}
    params = dict(named)
    trained = [name for name, param in params.items() if param.requires_grad]
    parts = {
        pattern: [param for name, param in params.items() if matches_or_holds(pattern, name)] for pattern in wanted
    }
    known = {name.rsplit('.', cut)[0] for name in trained for cut in range(name.count('.') + 1)}
    idle = [pattern for pattern in wanted if not any(matches_or_holds(pattern, name) for name in trained)]
    missing = ' '.join(f'{pattern!r}{near_names(pattern, known)}' for pattern in idle)
    if missing:
        raise ValueError(f'names nothing that is trained: {missing}')
    return parts
