"""What a plan needs so that FSDP2 trains it: parameters that it cannot shard with their unit stay whole.

[Note: dtypes of a unit]
FSDP2 keeps one dtype per unit for the parameters that it trains ("FSDP expects uniform original parameter dtype"),
since it reduces their gradients in one buffer. Frozen parameters may have any. Where trained ones have several, those
of the dtype with most elements are sharded; the others are whole on every rank, and their gradients are averaged along
with those of 0-dim parameters. A policy that makes their modules units of their own has them sharded.
"""

from collections import Counter
from dataclasses import replace

import torch
from torch import nn

from mmzero.policies import Unit, WrapPlan

SCALAR = 'is 0-dim, which FSDP2 cannot split'
EMPTY = 'has no elements, which FSDP2 cannot reduce'


def complete_plan(model: nn.Module, plan: WrapPlan) -> WrapPlan:
    """Say which parameters of each unit stay whole, and why. Pure.

    Args:
        model (nn.Module): The model; its parameters may be on the meta device.
        plan (WrapPlan): The plan.

    Returns:
        WrapPlan: The plan with ``whole`` of each unit.
    """
    params = dict(model.named_parameters())
    return replace(plan, units=tuple(replace(unit, whole=_whole(unit, params)) for unit in plan.units))


def _whole(unit: Unit, params: dict[str, nn.Parameter]) -> tuple[tuple[str, str], ...]:
    own = {name: params[name] for name in unit.params}
    dtype = _sharded_dtype(list(own.values()))
    found = []
    for name, param in own.items():
        if param.dim() == 0:
            found.append((name, SCALAR))
        elif not param.numel():
            found.append((name, EMPTY))
        elif param.requires_grad and param.dtype != dtype:
            found.append((name, f'is {_short(param.dtype)} in a unit that trains {_short(dtype)}'))
    return tuple(found)


def _sharded_dtype(params: list[nn.Parameter]) -> torch.dtype | None:
    """The dtype of most elements that train; the first of equals."""
    numels: Counter[torch.dtype] = Counter()
    for param in params:
        if param.requires_grad and param.dim():
            numels[param.dtype] += param.numel()
    return numels.most_common(1)[0][0] if numels else None


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix('torch.')
