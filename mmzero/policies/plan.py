"""The wrap plan: which modules are gathered and freed together."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from mmzero.errors import PlanError, near_names
from mmzero.policies.unit import Unit


@dataclass(frozen=True)
class WrapPlan:
    """The units of a model, children before the modules that hold them, the root unit last.

    Args:
        units (tuple[Unit, ...]): The units; their parameters are disjoint and cover the model.
        policy (str): What chose them, for tables and errors.
        notes (tuple[str, ...]): Why these, a line per group.
        faults (tuple[tuple[str, str], ...]): Units that cannot work if they are sharded, and why.
    """

    units: tuple[Unit, ...]
    policy: str
    notes: tuple[str, ...] = ()
    faults: tuple[tuple[str, str], ...] = ()

    @property
    def root(self) -> Unit:
        """The root unit: what no other unit holds."""
        return self.units[-1]

    @property
    def numel(self) -> int:
        """Elements of all parameters of the model."""
        return sum(unit.numel for unit in self.units)


def with_methods(plan: WrapPlan, methods: Mapping[str, Iterable[str]]) -> WrapPlan:
    """Let units be entered by methods other than forward.

    Args:
        plan (WrapPlan): The plan.
        methods (Mapping[str, Iterable[str]]): Names of units to names of methods that compute with their parameters;
            not such as only call the unit itself, which work as they are.

    Returns:
        WrapPlan: The plan.

    Raises:
        PlanError: If there is no such unit.
    """
    missing = methods.keys() - {unit.name for unit in plan.units}
    if missing:
        raise PlanError(f'{plan.policy}: {", ".join(map(repr, sorted(missing)))} is no unit, to be entered by a method')
    added = {name: tuple(dict.fromkeys(names)) for name, names in methods.items()}
    return replace(plan, units=tuple(replace(unit, methods=added.get(unit.name, unit.methods)) for unit in plan.units))


def make_plan(
    model: nn.Module,
    unit_names: Iterable[str],
    policy: str,
    notes: Sequence[str] = (),
    separate: Collection[str] = (),
) -> WrapPlan:
    """Divide a model's parameters among units.

    Args:
        model (nn.Module): The model; its parameters may be on the meta device.
        unit_names (Iterable[str]): Paths of the modules that are units; the root is added.
        policy (str): What chose them.
        notes (Sequence[str]): Why these. Defaults to none.
        separate (Collection[str]): Children that are sharded as models of their own. Defaults to none.

    Returns:
        WrapPlan: The plan, innermost units first.

    Raises:
        PlanError: If a name is not in the model or a parameter is shared between units.
    """
    modules = dict(model.named_modules())
    first = first_names(model)
    names = {first.get(name, name) for name in (*unit_names, *separate) if name}
    for name in names:
        if name not in modules:
            raise PlanError(f'{policy}: {name!r} is not a module of {type(model).__name__}{near_names(name, modules)}')
    owned: dict[str, list[tuple[int, str, nn.Parameter]]] = {name: [] for name in (*names, '')}
    owner_of: dict[int, tuple[str, str]] = {}
    for index, (path, param) in enumerate(model.named_parameters(remove_duplicate=False)):
        owner = innermost(path.rpartition('.')[0], names, first)
        first_owner, first_path = owner_of.setdefault(id(param), (owner, path))
        if first_owner != owner:
            raise PlanError(
                f'{policy}: {first_path} and {path} are one tied parameter, but lie in the units '
                f'{first_owner or "root"!r} and {owner or "root"!r}; leave one of the two modules out of '
                'the policy, or name a module that holds both'
            )
        if first_path == path:
            owned[owner].append((index, path, param))
    # Deeper modules first: an engine shards from the inside out, and the root holds the rest.
    place = {name: index for index, name in enumerate(modules)}
    order = sorted(names, key=lambda name: (-name.count('.'), place[name]))
    kept = {*separate, ''}
    units = [_unit(name, modules[name], owned[name]) for name in [*order, ''] if owned[name] or name in kept]
    units = [replace(unit, separate=True) if unit.name in separate else unit for unit in units]
    return WrapPlan(tuple(units), policy, tuple(notes))


def _unit(name: str, module: nn.Module, params: list[tuple[int, str, nn.Parameter]]) -> Unit:
    return Unit(
        name=name,
        class_name=type(module).__name__,
        params=tuple(path for _, path, _ in params),
        shapes=tuple(tuple(param.shape) for _, _, param in params),
        itemsizes=tuple(param.element_size() for _, _, param in params),
        trainable=tuple(param.requires_grad for _, _, param in params),
        places=tuple(index for index, _, _ in params),
        dtypes=tuple(param.dtype for _, _, param in params),
    )


def first_names(model: nn.Module) -> dict[str, str]:
    """Where modules are registered for the first time, which is what units are called by.

    Args:
        model (nn.Module): The model.

    Returns:
        dict[str, str]: By every other path that leads to a module, such as those of a block used in several places.
    """
    names: dict[int, str] = {}
    paths = model.named_modules(remove_duplicate=False)
    return {path: name for path, module in paths if (name := names.setdefault(id(module), path)) != path}


def innermost(path: str, names: Collection[str], first: Mapping[str, str] | None = None) -> str:
    """The unit that a module lies in.

    Args:
        path (str): Path of the module.
        names (Collection[str]): Names of units.
        first (Mapping[str, str], optional): As :func:`first_names` gives it, where the path may be another one.
            Defaults to None.

    Returns:
        str: The longest of the names that is the path or holds it; '' where none does.
    """
    parts = path.split('.')
    for end in range(len(parts), 0, -1):
        name = '.'.join(parts[:end])
        name = first.get(name, name) if first else name
        if name in names:
            return name
    return ''
