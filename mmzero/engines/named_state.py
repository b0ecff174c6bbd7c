"""An optimizer's state by names of parameters, as torch's FSDP1 saves it whole, in the order of this run."""

from collections.abc import Sequence
from typing import Any

from mmzero.engines.rank0 import on_rank0
from mmzero.engines.state import ADVICE
from mmzero.errors import CheckpointError


def with_numbers(state: dict[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Number the parameters of rank 0's state as this run does, if it names them. Collective.

    Args:
        state (dict): On rank 0 with ``state`` and ``param_groups``; ignored elsewhere.
        names (Sequence[Sequence[str]]): Names of this run's parameters, by groups.

    Returns:
        dict: On rank 0 as ``Optimizer.state_dict`` has it; elsewhere what was given.

    Raises:
        CheckpointError: On every rank, if the groups are not those of this run.
    """
    return on_rank0(lambda: numbered(state, names) if is_by_name(state) else state) or state


def is_by_name(state: dict[str, Any]) -> bool:
    """Say whether an optimizer's state names its parameters where others number them.

    Args:
        state (dict): With ``state`` and ``param_groups``.

    Returns:
        bool: Whether it does.
    """
    return any(isinstance(param, str) for group in state.get('param_groups', ()) for param in group['params'])


def numbered(state: dict[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Number the parameters as this run does. Without communication.

    FSDP1 without ``use_orig_params`` puts those of the outermost unit first.

    Args:
        state (dict): By names.
        names (Sequence[Sequence[str]]): Names of this run's parameters, by groups.

    Returns:
        dict: As ``Optimizer.state_dict`` has it.

    Raises:
        CheckpointError: If a group has other parameters than this run's, with the first that differ.
    """
    saved = [group['params'] for group in state['param_groups']]
    if len(saved) != len(names):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(saved)} groups and this run's {len(names)}, so that it has another "
            f'paramwise_cfg; {ADVICE}'
        )
    for index, (theirs, own) in enumerate(zip(saved, names, strict=True)):
        odd = sorted(set(theirs) ^ set(own))
        if odd:
            where = 'the checkpoint' if odd[0] in theirs else 'this run'
            raise CheckpointError(f'group {index} of the optimizer has {odd[0]!r} in {where} alone; {ADVICE}')
    order = {name: index for index, name in enumerate(name for own in names for name in own)}
    groups = [
        dict(group, params=[order[name] for name in own])
        for group, own in zip(state['param_groups'], names, strict=True)
    ]
    # What FSDP1 keeps of no parameter has a name of its own.
    entries = {order.get(name, name): entry for name, entry in state['state'].items()}
    return dict(state, state=entries, param_groups=groups)
