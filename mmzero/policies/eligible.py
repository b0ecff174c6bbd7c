"""Which modules may be units at all, whatever a policy prefers."""

from collections.abc import Iterable, Iterator

from mmengine.model import BaseModel
from torch import nn

from mmzero.policies.reach import Reach, reaches


def ineligible(model: nn.Module) -> dict[str, str]:
    """Say which modules cannot be units, or not safely, and why.

    A unit is gathered when its forward begins and freed when it ends, and every rank takes part in both. So it has to
    be called on every rank, in every step, through its own forward, and nothing in it may be used from outside.

    Args:
        model (nn.Module): The model; its parameters may be on the meta device.

    Returns:
        dict[str, str]: Reasons by the path of a module; modules without parameters are left out.
    """
    found = reaches(model)
    modules = dict(model.named_modules())
    reasons: dict[str, str] = {}
    for name, module in modules.items():
        if name and next(module.parameters(), None) is not None:
            reason = next(_reasons(modules, name, found), '')
            if reason:
                reasons[name] = reason
    return reasons


def faults_of(model: nn.Module, found: dict[str, Reach], names: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Find units that cannot work, whoever chose them.

    Args:
        model (nn.Module): The model; its parameters may be on the meta device.
        found (dict[str, Reach]): What its code reaches.
        names (Iterable[str]): Paths of the units.

    Returns:
        tuple[tuple[str, str], ...]: Units in which something is used from outside of their forward, and where.
    """
    faults = []
    for name in names:
        for below, place in list(found[name].in_forward.items() if name in found else ())[:1]:
            class_name = type(model.get_submodule(name)).__name__
            why = (
                f'{name} ({class_name}) cannot be a unit: {place} uses {below} outside of its forward, where it is '
                'sharded; leave it out of the policy'
            )
            faults.append((name, why))
    return tuple(faults)


def doubts_about(model: nn.Module, found: dict[str, Reach], names: Iterable[str]) -> list[str]:
    """Tell of units that the data, or a random draw, may let a rank skip, or for which it may find no work.

    Args:
        model (nn.Module): The model; its parameters may be on the meta device.
        found (dict[str, Reach]): What its code reaches.
        names (Iterable[str]): Paths of the units.

    Returns:
        list[str]: A line for each.
    """
    doubts = []
    for name in names:
        above = _paths_above(name)
        places = [found[path].skipped for path in above if path in found and found[path].skipped]
        pooling = [path for path in above if pools_regions(model.get_submodule(path))]
        places += [f'{path} works on the regions that a rank finds' for path in pooling]
        if places:
            class_name = type(model.get_submodule(name)).__name__
            doubts.append(f'{name} ({class_name}) has to run on every rank or on none, else ranks hang: {places[0]}')
    return doubts


def _reasons(modules: dict[str, nn.Module], name: str, found: dict[str, Reach]) -> Iterator[str]:
    module = modules[name]
    if has_no_forward(module):
        yield 'has no forward of its own'
    if name in found:
        reach = found[name]
        if reach.inside:
            below, place = next(iter(reach.inside.items()))
            yield f'{below} is used from outside: {place}'
        if reach.methods:
            method, place = next(iter(reach.methods.items()))
            yield f'is entered by {method}: {place}'
    for path in _paths_above(name):
        if path in found and found[path].skipped:
            yield f'{"" if path == name else f"is in {path}, which "}may be skipped: {found[path].skipped}'
        if pools_regions(modules[path]):
            yield f'is in {path}, which works on the regions that a rank finds'
    if is_head(module):
        yield 'is a head'
    for path in _paths_above(name)[1:]:
        if is_head(modules[path]) and sum(param.dim() > 1 for param in module.parameters()) < 2:
            yield f'is a single layer in the head {path}'
    owner = _owner(modules, name)
    if owner and is_head(modules[owner]):
        yield f'belongs to the head {owner}'


def has_no_forward(module: nn.Module) -> bool:
    """Whether a module is a mere container, which nothing can call.

    Args:
        module (nn.Module): The module.

    Returns:
        bool: Whether it is.
    """
    return type(module).forward is nn.Module.forward


def is_head(module: nn.Module) -> bool:
    """Whether a module computes losses, as heads of OpenMMLab do, and is no model by itself.

    Args:
        module (nn.Module): The module.

    Returns:
        bool: Whether it is.
    """
    return callable(getattr(type(module), 'loss', None)) and not isinstance(module, BaseModel)


def pools_regions(module: nn.Module) -> bool:
    """Whether a head pools features of regions (mmdet's RoI extractors): one rank may have none of them.

    Args:
        module (nn.Module): The module.

    Returns:
        bool: Whether it does.
    """
    return is_head(module) and any(hasattr(child, 'roi_layers') for child in module.modules())


def _paths_above(name: str) -> list[str]:
    parts = name.split('.')
    return ['.'.join(parts[:end]) for end in range(len(parts), 0, -1)]


def _owner(modules: dict[str, nn.Module], name: str) -> str:
    """The nearest module above that is no mere container of layers."""
    for path in _paths_above(name)[1:]:
        if not isinstance(modules[path], (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            return path
    return ''
