"""What a plan costs on some ranks: bytes of each unit while it is gathered, and of the shard that a rank keeps."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

import torch

from mmzero.policies.plan import WrapPlan
from mmzero.policies.unit import Unit


@dataclass(frozen=True)
class Gathering:
    """Among how many ranks units are sharded, and how an engine gathers them.

    Args:
        replicate (int): Groups that hold a full copy each. Defaults to 1.
        shard (int): Ranks that share one copy. Defaults to 1.
        param_dtype (torch.dtype, optional): In which units other than the root are gathered. Defaults to None: as
            they are stored.
        stays (bool): Whether units stay gathered from forward to backward. Defaults to False.
    """

    replicate: int = 1
    shard: int = 1
    param_dtype: torch.dtype | None = None
    stays: bool = False


@dataclass(frozen=True)
class UnitFigures:
    """Bytes of one unit on one rank.

    Args:
        unit (Unit): The unit.
        ranks (int): Among how many it is sharded.
        dtypes (tuple[str, ...]): In which it is gathered; several where its parameters are stored so.
        gathered_bytes (int): While it is gathered, with padding; without 0-dim parameters, which always are whole.
        lasting_bytes (int): What of it stays from forward to backward.
        kept_bytes (int): Of the largest shard, as it is stored.
        kept_numel (int): Elements of the largest shard.
        split_numel (int): Elements of the parameters that are split.
    """

    unit: Unit
    ranks: int
    dtypes: tuple[str, ...]
    gathered_bytes: int
    lasting_bytes: int
    kept_bytes: int
    kept_numel: int
    split_numel: int

    @property
    def padding(self) -> float:
        """The largest shard times the ranks, over the parameters; 1 is none."""
        return self.kept_numel * self.ranks / self.split_numel if self.split_numel else 1.0


@dataclass(frozen=True)
class PlanFigures:
    """Bytes of all units on one rank.

    Args:
        plan (WrapPlan): The plan.
        gathering (Gathering): How its units are gathered.
        units (tuple[UnitFigures, ...]): In the order in which the model registers their first parameters, the root
            last.
    """

    plan: WrapPlan
    gathering: Gathering
    units: tuple[UnitFigures, ...]

    @property
    def root(self) -> UnitFigures:
        """Of the root unit."""
        return self.units[-1]

    @property
    def gathered_bytes(self) -> int:
        """Of all units, were they gathered at once."""
        return sum(unit.gathered_bytes for unit in self.units)

    @property
    def kept_bytes(self) -> int:
        """Of all largest shards."""
        return sum(unit.kept_bytes for unit in self.units)

    @property
    def padding(self) -> float:
        """The largest shards times the ranks, over the parameters; 1 is none."""
        split = sum(unit.split_numel for unit in self.units)
        return sum(unit.kept_numel * unit.ranks for unit in self.units) / split if split else 1.0

    @cached_property
    def peak_gathered_bytes(self) -> int:
        """The most that is gathered at once: the root, and the two largest consecutive units.

        Consecutive is meant in the order in which the model registers their first parameters: while one computes, the
        next is gathered. What holds either of the two is gathered with them, and whatever stays gathered from forward
        to backward counts in full; of a unit that is resharded to n ranks stays an n-th.
        """
        units = {figures.unit.name: figures for figures in self.units[:-1] if figures.gathered_bytes}
        lasting = sum(figures.lasting_bytes for figures in units.values())
        order = list(units)
        most = 0
        for names in [*pairwise(order), *((name,) for name in order[:1])]:
            alive = {holder for name in names for holder in _holders(name) if holder in units}
            most = max(most, sum(units[name].gathered_bytes - units[name].lasting_bytes for name in alive))
        return self.root.gathered_bytes + lasting + most


def plan_figures(plan: WrapPlan, gathering: Gathering) -> PlanFigures:
    """Work out the bytes of a plan.

    Args:
        plan (WrapPlan): The plan.
        gathering (Gathering): How its units are gathered.

    Returns:
        PlanFigures: For one rank.
    """
    ordered = sorted(plan.units[:-1], key=lambda unit: min(unit.places, default=-1))
    return PlanFigures(plan, gathering, tuple(_figures(unit, gathering) for unit in (*ordered, plan.root)))


def _figures(unit: Unit, gathering: Gathering) -> UnitFigures:
    ranks = unit.ranks(gathering.shard)
    kept = unit.kept_numels(gathering.shard)
    dtype = unit.rules.param_dtype or (None if unit.is_root else gathering.param_dtype)
    sizes = unit.itemsizes if dtype is None else (dtype.itemsize,) * len(kept)
    split = [(numel, size) for numel, size, whole in zip(kept, sizes, unit.is_whole, strict=True) if not whole]
    gathered = ranks * sum(numel * size for numel, size in split)
    stored = unit.dtypes if dtype is None else (dtype,)
    return UnitFigures(
        unit=unit,
        ranks=ranks,
        dtypes=tuple(sorted({str(item).removeprefix('torch.') for item in stored})),
        gathered_bytes=gathered,
        lasting_bytes=_lasting(unit, gathered, gathering.stays),
        kept_bytes=sum(numel * size for numel, size in zip(kept, unit.itemsizes, strict=True)),
        kept_numel=sum(numel for numel, _ in split),
        split_numel=sum(prod(shape) for shape, whole in zip(unit.shapes, unit.is_whole, strict=True) if not whole),
    )


def _lasting(unit: Unit, gathered: int, stays: bool) -> int:
    """What stays of a unit after its forward; 'node' is taken for all ranks, since a plan knows no nodes."""
    reshard = unit.rules.reshard_after_forward
    if reshard is None:
        reshard = not stays
    if isinstance(reshard, bool):
        return 0 if reshard else gathered
    return gathered // reshard if isinstance(reshard, int) else 0


def _holders(name: str) -> Iterator[str]:
    """A module's path, and those of the modules above it."""
    while name:
        yield name
        name = name.rpartition('.')[0]


@dataclass(frozen=True)
class Replicated:
    """Parameters that every rank keeps whole.

    Args:
        params (tuple[str, ...]): Their names.
        reason (str): Why.
    """

    params: tuple[str, ...]
    reason: str


def replicated(plan: WrapPlan) -> tuple[Replicated, ...]:
    """Find what stays whole on every rank of a plan that is sharded, its gradients averaged by all-reduce.

    Args:
        plan (WrapPlan): The plan.

    Returns:
        tuple[Replicated, ...]: Parameters by reason.
    """
    reasons: dict[str, list[str]] = defaultdict(list)
    for unit in plan.units:
        named = dict(unit.whole)
        for name, shape in zip(unit.params, unit.shapes, strict=True):
            if not unit.rules.shard:
                reasons['shard=False'].append(name)
            elif not shape or name in named:
                reasons[named.get(name, '0-dim: nothing to split')].append(name)
    return tuple(Replicated(tuple(names), reason) for reason, names in sorted(reasons.items()))


def most_padded(figures: Sequence[UnitFigures]) -> tuple[str, int, int] | None:
    """Find the parameter that padding enlarges most.

    Args:
        figures (Sequence[UnitFigures]): Of the units.

    Returns:
        tuple[str, int, int], optional: Its name, its length along the dimension in which it is split, the ranks; None
        where nothing is padded.
    """
    padded = [
        (kept * item.ranks - prod(shape), name, shape[dim], item.ranks)
        for item in figures
        for name, shape, kept, dim, whole in zip(
            item.unit.params,
            item.unit.shapes,
            item.unit.kept_numels(item.ranks),
            item.unit.shard_dims(item.ranks),
            item.unit.is_whole,
            strict=True,
        )
        if not whole
    ]
    excess, name, rows, ranks = max(padded, default=(0, '', 0, 1))
    return (name, rows, ranks) if excess else None
