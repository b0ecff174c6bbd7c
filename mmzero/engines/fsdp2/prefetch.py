"""Gathering the next unit in forward before the current one computes, in the order that the first iteration shows.

[Note: explicit prefetching in forward]
A host that runs ahead of its GPU issues the next unit's all-gather in time by itself. Where it does not, since a
detector reads values from the GPU (assigners, ``.item()``), asking for it earlier lets it overlap; the memory is the
same (``FSDPModule.set_modules_to_forward_prefetch``). A unit that is gathered ahead and then not run would compute with
old weights later. FSDP2 drops at the end of a backward what was gathered in vain, but a forward that fails has none; so
it is dropped at the end of the forward. Any forward but those of training gathers nothing ahead, nor does any where the
first iteration ran a unit twice.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mmzero._compat import drop_gathered_ahead


class ForwardPrefetch:
    """Sets up prefetching from the first forward of training on.

    Args:
        units (list): The units without the root.
    """

    def __init__(self, units: list[Any]) -> None:
        self._units = units
        self._pairs: list[tuple[Any, Any]] | None = None

    def turn_off(self) -> None:
        """Gather nothing ahead from now on, as FSDP2 does by itself."""
        self._pairs = []

    @contextmanager
    def training(self) -> Iterator[None]:
        """The context of a forward of training: the first notes the order, later ones gather ahead.

        Yields:
            None: The forward runs inside.
        """
        if self._pairs is None:
            with _noting(self._units) as order:
                yield
            runs_once = len(set(order)) == len(order)
            self._pairs = list(zip(order, order[1:], strict=False)) if runs_once else []
            return
        for unit, after in self._pairs:
            unit.set_modules_to_forward_prefetch([after])
        try:
            yield
        finally:
            for unit, after in self._pairs:
                unit.set_modules_to_forward_prefetch([])
                drop_gathered_ahead(after)


@contextmanager
def _noting(units: list[Any]) -> Iterator[list[Any]]:
    order: list[Any] = []
    handles = [unit.register_forward_pre_hook(lambda unit, _: order.append(unit)) for unit in units]
    try:
        yield order
    finally:
        for handle in handles:
            handle.remove()
