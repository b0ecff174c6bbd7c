"""The default policy: the repeated blocks of a model, found by structure."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from torch import nn
from typing_extensions import override

from mmzero.policies.eligible import has_no_forward, ineligible
from mmzero.policies.policy import Choice, WrapPolicy
from mmzero.policies.tied import without_tied
from mmzero.registry import WRAP_POLICIES

MAJORITY = 2 / 3
"""Share of a module's parameters from which on what repeats inside of it is what it consists of."""

LARGE = 1 / 5
"""Share of the model above which a unit is divided even where that takes more units than it is worth otherwise."""

GAIN = 0.9
"""A finer division has to bring the peak below this part of the coarser one's."""

WORTH_A_HINT = 0.1
"""Share of the peak from which on a layer in the root unit is named in the notes."""

TOO_SMALL = 0.01
"""Share of the peak that the smallest units, left to what holds them, may add to it together."""


@WRAP_POLICIES.register_module()
class AutoPolicy(WrapPolicy):
    """Finds the repeated blocks of backbones, encoders and decoders by structure, and makes each a unit.

    Every rank has to run a unit in every step, through its own forward; modules of which the code says otherwise are
    never chosen: heads, what works on the regions or experts that the data pick, what is entered by another method or
    reached into from outside (:func:`mmzero.policies.eligible.ineligible`). Of the others, modules of one class that
    occur at least twice and hold at least two weights are candidates. Where candidates lie within each other:

    - a module that consists of a longer chain of blocks (a stage of a Swin) is divided into those, where that lowers
      the peak of gathered parameters, root unit + two consecutive units, by a tenth;
    - what a block consists of (its attention, its FFN) is not divided further: more units cost more collectives, each
      with its latency, and leave less computation to hide one behind.

    The smallest units, as far as they add less than a hundredth to the peak, are left to what holds them, and so are
    units that share a tied parameter. A model without repeated blocks is one unit. Each decision is a line of the
    plan's notes.

    Args:
        small (bool): Whether the smallest are chosen too: blocks with few parameters, such as the first of a backbone,
            often have the largest activations. Defaults to False.
    """

    def __init__(self, small: bool = False) -> None:
        if not isinstance(small, bool):
            raise ValueError(f'small: got {small!r}; allowed: True, False')
        self.small = small

    @override
    def choose(self, model: nn.Module) -> Choice:
        found = _Blocks(model)
        names = found.with_neighbours(found.blocks_in(''))
        names, tied = without_tied(model, names)
        kept = names if self.small else found.without_small(names)
        left = found.passed_over()
        if not kept:
            why = 'no repeated block can be a unit' if left or tied else 'no block is repeated'
            return Choice((), (f'AutoPolicy: {why}; the whole model is one unit', *left, *tied), tuple(found.hint([])))
        return Choice(tuple(kept), (*found.notes(names, kept), *left, *tied), tuple(found.hint(kept)))

    @override
    def __str__(self) -> str:
        return f'AutoPolicy{"(small=True)" if self.small else ""}'


class _Blocks:
    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.order = {name: index for index, name in enumerate(self.modules)}
        self.numels = {name: sum(p.numel() for p in module.parameters()) for name, module in self.modules.items()}
        self.reasons = ineligible(model)
        self.kinds = self._repeated()
        self.children: dict[str, list[str]] = defaultdict(list)
        for name in self.modules:
            if name:
                self.children[name.rpartition('.')[0]].append(name)
        self.divided: dict[str, bool] = {}

    def _repeated(self) -> dict[str, str]:
        """Candidates by path, with the kind that they are alike in."""
        kinds = {name: _kind(module) for name, module in self.modules.items() if self._may_be_block(name)}
        # A pattern are modules of one kind beside each other: single layers and projections are built alike anywhere.
        beside = Counter((self._place(name), kind) for name, kind in kinds.items())
        repeated = {kind for (_, kind), count in beside.items() if count > 1}
        return {name: kind for name, kind in kinds.items() if kind in repeated}

    def _place(self, name: str) -> str:
        """What a module is beside others in: what holds it, or for Sequentials the very container."""
        return name.rpartition('.')[0] if type(self.modules[name]) is nn.Sequential else self._owner(name)

    def blocks_in(self, path: str) -> list[str]:
        """The units below a module, the outermost that are blocks."""
        blocks: list[str] = []
        for child in self.children[path]:
            if child in self.kinds and not self._is_divided(self.kinds[child]):
                blocks.append(child)
            else:
                blocks += self.blocks_in(child)
        return blocks

    def with_neighbours(self, names: list[str]) -> list[str]:
        """Add what stands in a chain of blocks and is of another class: a first block that also changes the width."""
        places: dict[str, list[str]] = defaultdict(list)
        for name in names:
            places[name.rpartition('.')[0]].append(name)
        added = []
        for place, blocks in places.items():
            if not isinstance(self.modules[place], _CONTAINERS):
                continue
            least = min(self.numels[block] for block in blocks)
            for child in self.children[place]:
                holds_units = any(name == child or name.startswith(f'{child}.') for name in names)
                if not holds_units and self._may_be_block(child) and self.numels[child] >= least:
                    self.kinds[child] = _kind(self.modules[child])
                    added.append(child)
        return sorted([*names, *added], key=self.order.__getitem__)

    def _may_be_block(self, name: str) -> bool:
        return bool(name) and name not in self.reasons and _number_of_weights(self.modules[name]) >= 2

    def _is_divided(self, kind: str) -> bool:
        if kind not in self.divided:
            alike = [name for name, other in self.kinds.items() if other == kind]
            # A kind that occurs in itself is not asked about again.
            self.divided[kind] = False
            self.divided[kind] = self._consists_of_blocks(alike)
        return self.divided[kind]

    def _consists_of_blocks(self, alike: list[str]) -> bool:
        inner = {name: self.blocks_in(name) for name in alike}
        blocks = [block for group in inner.values() for block in group]
        share = sum(self.numels[block] for block in blocks) / max(sum(self.numels[name] for name in alike), 1)
        if all(type(self.modules[name]) is nn.Sequential for name in alike):
            return share > 1 / 2
        chains = [count for group in inner.values() for count in Counter(self.kinds[block] for block in group).values()]
        longest = max(chains, default=0)
        if share < MAJORITY or longest < 2:
            return False
        if all(isinstance(self.modules[name], nn.Sequential) for name in alike):
            return True
        is_large = max(self.numels[name] for name in alike) > LARGE * self.numels['']
        abreast = max(Counter(self._owner(name) for name in alike).values())
        return (is_large or longest > abreast) and self.peak(blocks) < GAIN * self.peak(alike)

    def _owner(self, name: str) -> str:
        while name:
            name = name.rpartition('.')[0]
            if not isinstance(self.modules[name], _CONTAINERS):
                return name
        return ''

    def peak(self, names: Sequence[str]) -> int:
        """Elements gathered at the peak: the root unit and two consecutive units."""
        sizes = [self.numels[name] for name in sorted(names, key=self.order.__getitem__)]
        pairs = [sum(sizes[index : index + 2]) for index in range(len(sizes))]
        return self.numels[''] - sum(sizes) + max(pairs, default=0)

    def without_small(self, names: list[str]) -> list[str]:
        """Leave out the smallest, as long as that adds little to the peak."""
        allowed = TOO_SMALL * self.peak(names)
        left_out: set[str] = set()
        alike: dict[tuple[int, str], list[str]] = defaultdict(list)
        for name in names:
            alike[self.numels[name], self.kinds[name]].append(name)
        for (numel, _), group in sorted(alike.items()):
            allowed -= numel * len(group)
            if allowed < 0:
                break
            left_out.update(group)
        return [name for name in names if name not in left_out]

    def notes(self, names: list[str], kept: list[str]) -> list[str]:
        lines = []
        for kind in dict.fromkeys(self.kinds[name] for name in names):
            group = [name for name in names if self.kinds[name] == kind]
            chosen = [name for name in kept if self.kinds[name] == kind]
            lines.append(self._note(type(self.modules[group[0]]).__name__, group, chosen))
        return lines

    def passed_over(self) -> list[str]:
        """Say why repeated blocks that make up a good part of the model are no units."""
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name, module in self.modules.items():
            if self.reasons.get(name) and not has_no_forward(module) and _number_of_weights(module) >= 2:
                groups[self._place(name), _kind(module)].append(name)
        outermost: list[str] = []
        lines = []
        for group in groups.values():
            is_large = sum(self.numels[name] for name in group) > WORTH_A_HINT * self.numels['']
            if len(group) < 2 or not is_large or any(group[0].startswith(f'{name}.') for name in outermost):
                continue
            outermost += group
            class_name = type(self.modules[group[0]]).__name__
            lines.append(f'{class_name}, {_times(len(group))}, is no unit: {group[0]} {self.reasons[group[0]]}')
        return lines

    def hint(self, kept: list[str]) -> list[str]:
        """Name single layers in the root that are a large part of the peak, such as the output of a language model."""
        held = set().union(*(self.modules[name].parameters() for name in kept))
        large = [
            name
            for name, module in self.modules.items()
            if name
            and not self.children[name]
            and self.numels[name] > WORTH_A_HINT * self.peak(kept)
            and held.isdisjoint(module.parameters())
        ]
        stays = [
            f'in the root unit: {name} ({self.numels[name]:,} parameters), which is no unit: {self.reasons[name]}'
            for name in large
            if name in self.reasons
        ]
        alone, _ = without_tied(self.modules[''], [name for name in large if name not in self.reasons])
        if not alone:
            return stays
        return [
            *stays,
            f'in the root unit: {", ".join(f"{name} ({self.numels[name]:,} parameters)" for name in alone)}; '
            f"wrap_policy=['AutoPolicy', dict(type='ModuleNamePolicy', names={alone})] makes units of them",
        ]

    def _note(self, class_name: str, group: list[str], chosen: list[str]) -> str:
        left = [name for name in group if name not in chosen]
        small = f'; too small to be worth a collective: {", ".join(left)}' if left else ''
        sizes = [self.numels[name] for name in group]
        place = f'{group[0]} ... {group[-1]}' if len(group) > 1 else group[0]
        span = f'{min(sizes):,}' if min(sizes) == max(sizes) else f'{min(sizes):,} to {max(sizes):,}'
        return f'{class_name}: {_times(len(group))} ({place}), {span} parameters each{small}'


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def _kind(module: nn.Module) -> str:
    """Modules of one kind are alike: of one class, or Sequentials of the same classes."""
    if type(module) is nn.Sequential:
        return f'Sequential({", ".join(_kind(child) for child in module)})'
    return f'{type(module).__module__}.{type(module).__qualname__}'


def _times(number: int) -> str:
    return f'repeated {number} times' if number > 1 else 'once, among repeated blocks'


def _number_of_weights(module: nn.Module) -> int:
    return sum(param.dim() > 1 for param in module.parameters())
