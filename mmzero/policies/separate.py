"""Children of a model that are models of their own, as the networks of a GAN are.

[Note: children that are models of their own]
A model whose ``train_step`` takes several optimizers calls its networks itself, in an order and number that only its
code knows, and none of them through the model's own forward. So each child with trained parameters is planned, gathered
and reduced by itself, as MMSeparateDistributedDataParallel wraps each by itself. Containers have no forward; what is in
them is called, and is such a child. What is frozen from the start stays whole on every rank, as it does there.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mmzero.errors import ConfigError, near_names
from mmzero.policies.eligible import has_no_forward
from mmzero.policies.plan import WrapPlan, innermost, make_plan, with_methods
from mmzero.policies.policy import WrapPolicy
from mmzero.policies.reach import entered_by, reaches
from mmzero.policies.unit import Unit

_PATH = 'model_wrapper_cfg.separate'


def separate_children(model: nn.Module) -> tuple[str, ...]:
    """Find the children that train.

    Args:
        model (nn.Module): The model; its parameters may be on the meta device.

    Returns:
        tuple[str, ...]: Their paths, in the order of the model.

    Raises:
        ConfigError: If none does, if trained parameters lie outside of all of them, or two of them share one.
    """
    found = tuple(path for name, child in model.named_children() for path in _trained(name, child))
    if not found:
        raise ConfigError([f'{_PATH}: no child of this {type(model).__name__} has trained parameters'])
    outside = [name for name, param in model.named_parameters() if param.requires_grad and not innermost(name, found)]
    if outside:
        raise ConfigError(
            [
                f'{_PATH}: no child that is called holds the trained {", ".join(outside[:3])}, so that nothing would '
                'gather them or average their gradients over ranks; put such parameters into a child with a forward, '
                'or freeze them'
            ]
        )
    _check_shared(model, found)
    return found


def _trained(name: str, module: nn.Module) -> Iterator[str]:
    if not any(param.requires_grad for param in module.parameters()):
        return
    if not has_no_forward(module):
        yield name
        return
    for child, below in module.named_children():
        yield from _trained(f'{name}.{child}', below)


def _check_shared(model: nn.Module, names: tuple[str, ...]) -> None:
    owners: dict[int, tuple[str, str]] = {}
    for path, param in model.named_parameters(remove_duplicate=False):
        owner = innermost(path, names)
        first, first_path = owners.setdefault(id(param), (owner, path))
        if first != owner:
            raise ConfigError(
                [
                    f'{_PATH}: {first_path} and {path} are one parameter, of the children {first or "(none)"} and '
                    f'{owner or "(none)"}, which are sharded by themselves and would each reduce its gradient; give '
                    'each child its own, or make one child of both'
                ]
            )


def separate_plan(
    model: nn.Module, policy: WrapPolicy, dtypes: Mapping[str, torch.dtype | None] | None = None
) -> WrapPlan:
    """Plan each child that trains as a model of its own.

    Args:
        model (nn.Module): The model; its parameters may be on the meta device.
        policy (WrapPolicy): Chooses the units within the children, by their paths in the model.
        dtypes (Mapping[str, torch.dtype or None], optional): In which the units of some children are gathered.
            Defaults to None: all as the rest of the config says.

    Returns:
        WrapPlan: The units of all children; each child itself is a unit, the root unit of its own, and the root unit of
        the model holds what is frozen.

    Raises:
        PlanError: If the policy does not fit the children.
        ConfigError: If these cannot be separate.
    """
    roots = separate_children(model)
    dtypes = dtypes or {}
    wrong = [name for name in dtypes if not any(innermost(root, [name]) for root in roots)]
    if wrong:
        known = [*roots, *(root.split('.')[0] for root in roots)]
        raise ConfigError(
            [f'{_PATH}: {name!r} is no child with trained parameters{near_names(name, known)}' for name in wrong]
        )
    # The model's own code, which decides when a child is called, says nothing about the units within.
    chosen = policy(_only(model, roots))
    names = [unit.name for unit in chosen.units if unit.name]
    plan = make_plan(model, names, chosen.policy, (*chosen.notes, *_notes(model, roots)), roots)
    found = reaches(model)
    methods = {unit.name: unit.methods for unit in chosen.units if unit.name and unit.methods}
    entered = entered_by(model, found, [unit.name for unit in plan.units if unit.name])
    plan = with_methods(plan, {**entered, **{name: known for name, known in methods.items() if name not in entered}})
    rules = {unit.name: unit.rules for unit in chosen.units if unit.name}

    def complete(unit: Unit) -> Unit:
        own = rules.get(unit.name, unit.rules)
        if not unit.name:
            return replace(unit, rules=replace(own, shard=False))
        dtype = of_child(innermost(unit.name, roots), dtypes, False)
        if dtype is not False and not unit.separate and own.param_dtype is None:
            own = replace(own, param_dtype=dtype or torch.float32)
        return replace(unit, rules=own)

    faults = (*chosen.faults, *_reached_into(model, plan, roots))
    return replace(plan, units=tuple(complete(unit) for unit in plan.units), faults=faults)


def of_child(name: str, values: Mapping[str, Any], default: Any) -> Any:
    """Look up what is said of a child, or of the container that it is in.

    Args:
        name (str): Path of the child.
        values (Mapping[str, Any]): By the paths of children or containers.
        default (Any): Where nothing is said.

    Returns:
        Any: What is said of the nearest.
    """
    found = innermost(name, values.keys())
    return values[found] if found else default


def _only(model: nn.Module, roots: tuple[str, ...]) -> nn.Module:
    """The children under their names, without the model's code."""
    holder = nn.Module()
    for name in dict.fromkeys(root.split('.')[0] for root in roots):
        holder.add_module(name, model.get_submodule(name))
    return holder


def _notes(model: nn.Module, roots: tuple[str, ...]) -> list[str]:
    notes = [f'sharded as models of their own: {", ".join(roots)}']
    frozen = [
        name
        for name, child in model.named_children()
        if next(child.parameters(), None) is not None and not any(param.requires_grad for param in child.parameters())
    ]
    return notes + ([f'frozen, and whole on every rank: {", ".join(frozen)}'] if frozen else [])


def _reached_into(model: nn.Module, plan: WrapPlan, roots: tuple[str, ...]) -> list[tuple[str, str]]:
    """Children of which the model's own code uses a part, by another way than the child."""
    faults = []
    for name, reach in reaches(model).items():
        if name in roots and reach.in_forward:
            below, place = next(iter(reach.in_forward.items()))
            faults.append(
                (
                    name,
                    f'{name} cannot be sharded by itself: {place} uses {below} outside of its forward, where it is '
                    f'sharded; let a method of {name} do it, and call that',
                )
            )
    return faults


def within(plan: WrapPlan, root: str) -> WrapPlan:
    """The part of a plan that is one child's.

    Args:
        plan (WrapPlan): Of :func:`separate_plan`.
        root (str): The child.

    Returns:
        WrapPlan: Its units, the child's own last.
    """
    roots = [unit.name for unit in plan.units if unit.separate]
    return replace(plan, units=tuple(unit for unit in plan.units if innermost(unit.name, roots) == root))
