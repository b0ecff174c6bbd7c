"""The optimizer's state in the layout of the unsharded optimizer, and back, one tensor at a time."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmzero.engines.deepspeed.fragments import Fragments
from mmzero.engines.deepspeed.groups import AllGroups
from mmzero.engines.materialize import broadcast
from mmzero.engines.meeting import meet
from mmzero.engines.state import (
    ADVICE,
    Whole,
    check_groups,
    check_names,
    described_state,
    on_devices_of,
    refuse_other,
)
from mmzero.errors import CheckpointError


def gather_state(groups: AllGroups, fragments: Fragments, names: list[list[str]]) -> dict[str, Any]:
    """Gather an optimizer's state. Collective.

    Args:
        groups (AllGroups): The groups.
        fragments (Fragments): What this rank holds.
        names (list[list[str]]): Names of the groups' parameters.

    Returns:
        dict: ``Optimizer.state_dict()`` of the unsharded optimizer on rank 0, with ``param_names``; empty elsewhere.
    """
    meet("gather the optimizer's state")
    state: dict[int, dict[str, Any]] = {}
    for index, param in enumerate(_all(groups)):
        if param in fragments.of and (entries := _gather_entries(param, fragments)):
            state[index] = entries
    numbers = iter(range(len(_all(groups))))
    packed = [
        dict(group, params=[next(numbers) for _ in group['params']]) for group in groups.as_of_model().param_groups
    ]
    return dict(state=state, param_groups=packed, param_names=names) if dist.get_rank() == 0 else {}


def _all(groups: AllGroups) -> list[nn.Parameter]:
    return [param for group in groups.params for param in group]


def _gather_entries(param: nn.Parameter, fragments: Fragments) -> dict[str, Any]:
    fragment = fragments.of[param]
    found: dict[str, Any] = {}
    flat = fragments.flat(fragment.group)
    for name, value in fragments.entries(fragment.group).items():
        if isinstance(value, Tensor) and value.shape == flat.shape:
            found[name] = fragments.gather(param, fragment.of(value))
        else:
            found[name] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
    return found


def scatter_state(groups: AllGroups, fragments: Fragments, full: dict[str, Any], names: list[list[str]]) -> None:
    """Fill an optimizer's state from the full one of rank 0. Collective.

    Args:
        groups (AllGroups): The groups; changed in place.
        fragments (Fragments): What this rank holds; changed in place.
        full (dict): ``Optimizer.state_dict()`` of an unsharded optimizer on rank 0; ignored on other ranks.
        names (list[list[str]]): Names of this run's parameters by groups.

    Raises:
        CheckpointError: On every rank, if the groups or the kind of optimizer do not fit.
    """
    box = [described_state(full, _has_elements)] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(box, src=0)
    described: dict[str, Any] = box[0]  # type: ignore[assignment]
    check_groups(groups.as_of_model(), described['param_groups'])
    check_names(described.get('param_names', names), names)
    refuse_other(
        groups.inner,
        [key for key in groups.defaults if any(key not in group for group in described['param_groups'])],
    )
    for group, saved in zip(groups.param_groups, described['param_groups'], strict=True):
        group.update(on_devices_of({key: value for key, value in saved.items() if key != 'params'}, group))
    plain = _plain_entries(groups, fragments, described['state'])
    for index, param in enumerate(_all(groups)):
        if param in fragments.of:
            source = full['state'].get(index, {}) if dist.get_rank() == 0 else {}
            _scatter_entries(param, fragments, described['state'].get(index, {}), plain, source)
    _link(fragments.zero)


def _has_elements(value: Any) -> bool:
    """Whether it is cut; of a counter DeepSpeed has one for all parameters of a flat tensor."""
    return isinstance(value, Tensor) and value.dim() > 0


def _plain_entries(groups: AllGroups, fragments: Fragments, state: dict[int, dict[str, Any]]) -> dict[int, dict]:
    """Counters by flat tensor, which has one for all its parameters."""
    found: dict[int, dict[str, Any]] = {}
    for index, param in enumerate(_all(groups)):
        if param not in fragments.of:
            continue
        plain = {name: value for name, value in state.get(index, {}).items() if not isinstance(value, Whole)}
        before = found.setdefault(fragments.of[param].group, plain)
        if {name: float(value) for name, value in before.items()} != {k: float(v) for k, v in plain.items()}:
            raise CheckpointError(
                f'parameter {index} of the checkpoint took other numbers of steps than others of its group ({plain} '
                f'and {before}), for which DeepSpeed has one number; {ADVICE}'
            )
    return found


def _scatter_entries(
    param: nn.Parameter, fragments: Fragments, entries: dict[str, Any], plain: dict[int, dict], source: dict[str, Any]
) -> None:
    fragment = fragments.of[param]
    flat = fragments.flat(fragment.group)
    state = fragments.zero.optimizer.state.setdefault(flat, {})
    if not entries:
        state.clear()
    for name, value in plain[fragment.group].items():
        state[name] = value.clone() if isinstance(value, Tensor) else value
    for name, entry in entries.items():
        if not isinstance(entry, Whole):
            continue
        if entry.shape != tuple(fragment.shape):
            raise CheckpointError(
                f"{name} of the checkpoint's optimizer has shape {entry.shape}, the parameter "
                f'{tuple(fragment.shape)}: another optimizer, or another order of parameters; {ADVICE}'
            )
        whole = torch.empty(entry.shape, dtype=entry.dtype, device=fragments.device)
        if dist.get_rank() == 0:
            whole.copy_(source[name])
        broadcast(whole)
        if name not in state or not isinstance(state[name], Tensor) or state[name].shape != flat.shape:
            state[name] = torch.zeros_like(flat, dtype=entry.dtype, requires_grad=False)
        fragment.of(state[name]).copy_(fragments.cut(param, whole))


def _link(zero: Any) -> None:
    """Show DeepSpeed the state, of which it keeps views by parameter."""
    if hasattr(zero, '_hp_optimizer_states_linked') and zero.optimizer.state:
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()
