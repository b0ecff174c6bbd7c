"""Recomputing no more than the memory demands: ``type='Budget'``.

[Note: the budget]
A model that needs a budget does not fit without recomputing, so the first iterations recompute every module and look,
in each forward, at what it would have kept: torch's checkpoint is asked for the place of each saved tensor, and bytes
are counted on the way. The first iteration also warms up; of two, the shorter time of each module counts. Then the
cheapest set is chosen, from the largest figures of all ranks, so that it is the same on every rank. The next iteration
is counted too. Where it keeps more than was forecast, the choice is made again with that much less.

A later batch may be larger than those. A module that gets more bytes than were measured is recomputed for this time,
on this rank, whatever was chosen, unless it holds units of its own, which ranks would gather in different numbers, or
a SyncBatchNorm, in which they would wait for each other.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mmzero.patches.cheapest import Choice, Measured, cheapest, choice_of
from mmzero.patches.checkpoint import Region
from mmzero.patches.observation import Observation, Summary, combine

MEASURED_ITERATIONS = 2


class Budget:
    """Chooses which regions are recomputed; see [Note: the budget].

    Args:
        regions (Mapping[str, Region]): What may be recomputed, by path. Of nested ones, the inner ones are.
        memory (int): Bytes that may be kept for backward on a rank, with those of one recompute; the least
            that any rank gives counts.
        gather (Callable): Collective: from this rank's object to those of all ranks.
        report (Callable): Takes a text for the log, and whether it is a warning.
        units (Collection[str]): Paths of the engine's units. Defaults to none.

    Attributes:
        is_done (bool): Whether the choice stands.
    """

    def __init__(
        self,
        regions: Mapping[str, Region],
        memory: int,
        gather: Callable[[Any], list[Any]],
        report: Callable[[str, bool], None],
        units: Collection[str] = (),
    ) -> None:
        self.memory = memory
        self.choice: Choice | None = None
        self._regions = {name: region for name, region in regions.items() if not _holds(name, regions)}
        for name in regions.keys() - self._regions.keys():
            regions[name].active = False
        self._with_units = {name for name in self._regions if _holds(name, units)}
        self._gather = gather
        self._report = report
        self._summaries: list[Summary] = []
        self._observation = Observation()
        self._modules: list[Measured] = []
        self._other = 0
        self._margin = 0
        self.is_done = not self._regions
        self._told = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The context of a forward in training; until the choice stands, what is kept is counted.

        Yields:
            None: The forward runs inside.
        """
        if self.is_done:
            yield
            return
        self._observation = Observation()
        if self._measures:
            for name, region in self._regions.items():
                region.observe = self._observation.of(name)
        try:
            with self._observation.forward():
                yield
        finally:
            for region in self._regions.values():
                region.observe = None

    @property
    def _measures(self) -> bool:
        return self.choice is None

    def after_step(self) -> None:
        """Choose, where it is time to. Collective, until the choice stands."""
        if self.is_done:
            self._tell_of_larger()
        elif not self._measures:
            self._check()
        else:
            self._summaries.append(self._observation.summary())
            if len(self._summaries) == MEASURED_ITERATIONS:
                self._modules, self._other = combine(self._gather(self._summaries))
                # Ranks that choose differently would wait for each other.
                self.memory = min(self._gather(self.memory))
                self._choose()

    def _choose(self) -> None:
        everything = frozenset(module.name for module in self._modules)
        choice = cheapest(self._modules, self._other, self.memory - self._margin)
        if choice is None:
            # There is nothing left to choose.
            self.is_done = True
            choice = choice_of(self._modules, self._other, everything)
        self.choice = choice
        for module in self._modules:
            region = self._regions[module.name]
            region.active = module.name in choice.recomputed
            is_alone = module.name not in self._with_units and not region.communicates
            region.largest = module.largest if is_alone else None
        self._report(self._text(choice), self.is_done)

    def _check(self) -> None:
        """Choose again, with less, where more is kept than may be."""
        kept = max(self._gather(self._observation.kept))
        self.is_done = kept <= self.memory
        if not self.is_done:
            self._margin += kept - self.memory
            self._choose()

    def _text(self, choice: Choice) -> str:
        nothing = choice_of(self._modules, self._other, frozenset())
        everything = choice_of(self._modules, self._other, frozenset(module.name for module in self._modules))
        forward = everything.seconds or 1.0
        lines = [
            f'activation_checkpointing: a budget of {_size(self.memory)} for what is kept for backward on a rank, '
            f'with one recompute under way: recomputing none of {len(self._modules)} modules takes '
            f'{_size(nothing.peak)}, all of them {_size(everything.peak)}'
        ]
        if self.is_done:
            lines.append(
                'which is more than the budget, so all of them are recomputed; give that much, take smaller batches, '
                'or name modules in policy that hold more of the model or divide the largest ones'
            )
        lines.append(
            f'recomputed are {len(choice.recomputed)}, which takes {_size(choice.peak)} and runs '
            f'{choice.seconds / forward:.0%} of the time of all their forwards again: '
            f'{", ".join(sorted(choice.recomputed)) or "none"}'
        )
        unknown = sorted(self._regions.keys() - {module.name for module in self._modules})
        if unknown:
            # They were compiled, or no rank has run them.
            lines.append(f'not measured, and recomputed as they were: {", ".join(unknown)}')
        return '; '.join(lines)

    def _tell_of_larger(self) -> None:
        if not self._told and any(region.has_outgrown for region in self._regions.values()):
            self._told = True
            self._report(
                'activation_checkpointing: a batch is larger than those that the budget was chosen by; modules that '
                'get more than they did then are recomputed. To have a choice for the largest, let the first '
                f'{MEASURED_ITERATIONS} batches be of their size',
                True,
            )


def _holds(name: str, others: Collection[str]) -> bool:
    """Whether others lie below a module."""
    return any(other.startswith(f'{name}.') for other in others)


def _size(size: int) -> str:
    for unit, power in (('GiB', 30), ('MiB', 20), ('KiB', 10)):
        if size >= 2**power:
            return f'{size / 2**power:.2f} {unit}'
    return f'{size} B'
