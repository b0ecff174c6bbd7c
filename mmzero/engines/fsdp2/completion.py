"""What a plan needs so that FSDP2 trains it: units of float32 inside others, and parameters that stay whole.

[Note: dtypes of a unit]
FSDP2 keeps one dtype per unit for the parameters that it trains ("FSDP expects uniform original parameter dtype"),
since it reduces their gradients in one buffer. Frozen parameters may have any. Where trained ones have several, those
of the dtype with most elements are sharded; the others are whole on every rank, and their gradients are averaged along
with those of 0-dim parameters. A policy that makes their modules units of their own has them sharded.

[Note: float32 inside of 16 bit]
A unit has one dtype in which it is gathered. What is to be gathered in float32 within it becomes a unit of its own,
module by module: modules that share a group (``fully_shard([a, b])``) would be freed after the last one's forward only,
which a recomputation that stops early never comes to. Batch norms and instance norms are such units by themselves: they
want their weights in the dtype of their statistics, and without any refuse an input in float32 with weights of 16 bit;
inputs of 16 bit they take as they are.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from mmzero.config import ZeroConfig
from mmzero.engines.fsdp2.unit_rules import reduced_dtype
from mmzero.errors import ConfigError, near_names
from mmzero.policies import Unit, WrapPlan, make_plan
from mmzero.policies.patterns import matches_or_holds, without_match
from mmzero.policies.plan import innermost

SCALAR = 'is 0-dim, which FSDP2 cannot split'
EMPTY = 'has no elements, which FSDP2 cannot reduce'


def keep_fp32(model: nn.Module, plan: WrapPlan, config: ZeroConfig) -> WrapPlan:
    """Make units of what is gathered in float32 inside of units of 16 bit. Pure.

    Args:
        model (nn.Module): The model; its parameters may be on the meta device.
        plan (WrapPlan): The plan.
        config (ZeroConfig): The config; ``precision.keep_fp32`` names modules.

    Returns:
        WrapPlan: The plan with these units and a note on them.

    Raises:
        ConfigError: If a pattern names nothing that would be gathered in 16 bit.
    """
    patterns = config.precision.keep_fp32
    reduced = {unit.name: unit for unit in plan.units if reduced_dtype(unit, config) is not None}
    units = {unit.name for unit in plan.units}
    # By the path of the module, which may be a unit itself: its unit, and whether inputs are cast.
    found: dict[str, tuple[Unit, bool]] = {}
    inside: list[str] = []
    for name, module in model.named_modules():
        unit = reduced.get(innermost(name, units))
        if unit is None or next(module.parameters(), None) is None:
            continue
        inside.append(name)
        # Lists of modules have no forward; what is in them does.
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            continue
        if any(matches_or_holds(pattern, name) for pattern in patterns):
            found[name] = unit, True
        elif isinstance(module, _NormBase):
            found[name] = unit, False
    _check_patterns(patterns, inside)
    outermost = {name: item for name, item in found.items() if not _lies_in_another(name, found)}
    return _with_units(model, plan, outermost, _notes(outermost))


def _check_patterns(patterns: Sequence[str], inside: Sequence[str]) -> None:
    missing = without_match(patterns, inside)
    why = 'no module with parameters that is gathered in 16 bit'
    if missing and not inside:
        why += ': no unit is; set precision.param_dtype, or leave it out'
    if missing:
        raise ConfigError(
            [
                f'model_wrapper_cfg.precision.keep_fp32: {item!r} names {why}{near_names(item, inside)}'
                for item in missing
            ]
        )


def _lies_in_another(name: str, found: dict[str, tuple[Unit, bool]]) -> bool:
    """Whether a module above it, of the same unit, was found as well."""
    parts = name.split('.')
    above = ['.'.join(parts[:end]) for end in range(1, len(parts))]
    return any(other in found and found[other][0] is found[name][0] for other in above)


def _notes(found: dict[str, tuple[Unit, bool]]) -> tuple[str, ...]:
    named = sum(casts for _, casts in found.values())
    norms = len(found) - named
    notes = (
        [f'{named} modules are gathered in float32, each by itself: precision.keep_fp32 names them'] if named else []
    )
    if norms:
        notes.append(f'{norms} norm layers are gathered in float32, each by itself, as their statistics are')
    return tuple(notes)


def _with_units(
    model: nn.Module, plan: WrapPlan, found: dict[str, tuple[Unit, bool]], notes: tuple[str, ...]
) -> WrapPlan:
    if not found:
        return plan
    before = {unit.name: unit for unit in plan.units}
    separate = [unit.name for unit in plan.units if unit.separate]
    made = make_plan(model, [*before, *found], plan.policy, (*plan.notes, *notes), separate)

    def complete(unit: Unit) -> Unit:
        old = before.get(unit.name)
        rules, methods = (old.rules, old.methods) if old is not None else (found[unit.name][0].rules, ())
        if unit.name in found:
            rules = replace(rules, param_dtype=torch.float32, cast_forward_inputs=found[unit.name][1])
        # What is gathered by itself for its dtype alone is no region for a compiler.
        return replace(unit, rules=rules, methods=methods, compiled=old is not None and old.compiled)

    return replace(made, units=tuple(complete(unit) for unit in made.units))


def keep_whole(model: nn.Module, plan: WrapPlan) -> WrapPlan:
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
