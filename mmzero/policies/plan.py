"""The wrap plan: which modules are gathered and freed together."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from mmzero.errors import PlanError, near_names


@dataclass(frozen=True)
class UnitRules:
    """How one unit is treated where that differs from the rest; None: as the stage and the precision say.

    Args:
        reshard_after_forward (bool or int or str, optional): Whether its gathered parameters are freed after
            forward; a number of ranks, or 'node' for those of one node: resharded to so many, so that backward
            gathers among them alone.
        param_dtype (torch.dtype, optional): In which it is gathered.
        cast_forward_inputs (bool, optional): Whether floating inputs of its forward are cast to ``param_dtype``.
        shard_dim (int, optional): The dimension along which its parameters are split; those with fewer dimensions
            are split along dim 0.
        shard (bool): False: every rank keeps it whole, and gradients are averaged by all-reduce.
    """

    reshard_after_forward: bool | int | str | None = None
    param_dtype: torch.dtype | None = None
    cast_forward_inputs: bool | None = None
    shard_dim: int | None = None
    shard: bool = True


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together: those below a module that are in no smaller unit.

    Args:
        name (str): Path of the module in the model; '' is the model itself, the root unit.
        class_name (str): Class of the module.
        params (tuple[str, ...]): Names of its parameters in the model, each tensor once.
        shapes (tuple[tuple[int, ...], ...]): Their shapes.
        itemsizes (tuple[int, ...]): Bytes per element, parameter by parameter.
        trainable (tuple[bool, ...]): Which of them require gradients.
        places (tuple[int, ...]): Their indices in the order in which the model registers all its parameters,
            which is about the order in which forward uses them.
        rules (UnitRules): How it differs from other units.
        dtypes (tuple[torch.dtype, ...]): In which they are stored, parameter by parameter.
        whole (tuple[tuple[str, str], ...]): Names of parameters that every rank keeps whole, and why; 0-dim ones do
            so without being named.
        methods (tuple[str, ...]): Methods other than forward by which it is entered.
    """

    name: str
    class_name: str
    params: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    itemsizes: tuple[int, ...]
    trainable: tuple[bool, ...]
    places: tuple[int, ...]
    rules: UnitRules = UnitRules()
    dtypes: tuple[torch.dtype, ...] = ()
    whole: tuple[tuple[str, str], ...] = ()
    methods: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(_numel(shape) for shape in self.shapes)

    def gathered_bytes(self, itemsize: int | None = None) -> int:
        """Bytes while the unit is gathered.

        Args:
            itemsize (int, optional): Bytes per element in the gathered dtype. Defaults to None: as stored.

        Returns:
            int: Bytes.
        """
        sizes = self.itemsizes if itemsize is None else (itemsize,) * len(self.shapes)
        return sum(_numel(shape) * size for shape, size in zip(self.shapes, sizes, strict=True))

    def kept_bytes(self, shard_size: int) -> int:
        """Bytes of the largest shard that a rank keeps, with its padding.

        FSDP2 splits dim 0 into ``shard_size`` chunks of equal, rounded-up length
        (``torch.distributed.tensor.Shard(0)``), and another dim only where it divides evenly.

        Args:
            shard_size (int): Ranks that share the parameters.

        Returns:
            int: Bytes.
        """
        numels = self.kept_numels(shard_size)
        return sum(numel * size for numel, size in zip(numels, self.itemsizes, strict=True))

    def trained_numel(self, shard_size: int = 1) -> int:
        """Elements, kept by a rank, of the parameters that require gradients.

        Args:
            shard_size (int): Ranks that share the parameters. Defaults to 1.

        Returns:
            int: Elements.
        """
        return sum(numel for numel, train in zip(self.kept_numels(shard_size), self.trainable, strict=True) if train)

    def trained_bytes(self, shard_size: int = 1) -> int:
        """Bytes, kept by a rank, of the parameters that require gradients.

        Args:
            shard_size (int): Ranks that share the parameters. Defaults to 1.

        Returns:
            int: Bytes.
        """
        sizes = zip(self.kept_numels(shard_size), self.itemsizes, self.trainable, strict=True)
        return sum(numel * size for numel, size, train in sizes if train)

    def kept_numels(self, shard_size: int) -> tuple[int, ...]:
        """Elements of the largest shard of each parameter, with its padding.

        Args:
            shard_size (int): Ranks that share the parameters.

        Returns:
            tuple[int, ...]: Elements, parameter by parameter; all of one that is not split.
        """
        ranks, dims = self.ranks(shard_size), self.shard_dims(shard_size)
        split = zip(self.shapes, dims, self.is_whole, strict=True)
        return tuple(_numel(shape) if whole else _rows(shape, dim, ranks) for shape, dim, whole in split)

    def ranks(self, shard_size: int) -> int:
        """Ranks that share its parameters.

        Args:
            shard_size (int): Ranks of the shard dimension.

        Returns:
            int: As many, or 1 where it is not sharded.
        """
        return shard_size if self.rules.shard else 1

    @property
    def is_whole(self) -> tuple[bool, ...]:
        """Which parameters are on every rank, outside of what is gathered and reduced for the unit."""
        named = dict(self.whole)
        return tuple(not shape or name in named for name, shape in zip(self.params, self.shapes, strict=True))

    def shard_dims(self, shard_size: int) -> tuple[int, ...]:
        """The dimension along which each parameter is split.

        FSDP2 splits any other dim than 0 into even parts only; what has no such dim is split along dim 0.

        Args:
            shard_size (int): Ranks of the shard dimension.

        Returns:
            tuple[int, ...]: Dimensions, parameter by parameter.
        """
        dim, ranks = self.rules.shard_dim or 0, self.ranks(shard_size)
        return tuple(dim if len(shape) > dim and shape[dim] % ranks == 0 else 0 for shape in self.shapes)


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


def make_plan(model: nn.Module, unit_names: Iterable[str], policy: str, notes: Sequence[str] = ()) -> WrapPlan:
    """Divide a model's parameters among units.

    Args:
        model (nn.Module): The model; its parameters may be on the meta device.
        unit_names (Iterable[str]): Paths of the modules that are units; the root is added.
        policy (str): What chose them.
        notes (Sequence[str]): Why these. Defaults to none.

    Returns:
        WrapPlan: The plan, innermost units first.

    Raises:
        PlanError: If a name is not in the model or a parameter is shared between units.
    """
    modules = dict(model.named_modules())
    first = first_names(model)
    names = {first.get(name, name) for name in unit_names if name}
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
    units = [_unit(name, modules[name], owned[name]) for name in [*order, ''] if owned[name] or not name]
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


def _rows(shape: tuple[int, ...], dim: int, ranks: int) -> int:
    """Elements of the largest of so many chunks."""
    return -(-shape[dim] // ranks) * (_numel(shape) // shape[dim]) if shape[dim] else 0


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
