"""Taking part in the forwards of other ranks without one of one's own.

[Note: following]
In val and test all that ranks do together in a forward is to gather units. A rank without a batch gathers and frees
them in the same order, through FSDP2's own entry to a forward, and computes nothing: no code of the model runs there,
so that no sample is seen twice. The order is that of the forwards which the rank has run itself; one that has had no
batch at all is told by the first rank that has one, word by word in that rank's first forward. What ranks do together
besides (a model that reduces in its own code) has to be the same on all of them, as under DDP.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp import register_fsdp_forward_method

from mmzero._compat import default_store, group_timeout, kept_gathered
from mmzero.engines.loops import Loop
from mmzero.engines.meeting import started
from mmzero.engines.place import looks, places, raise_of_failed
from mmzero.errors import PlanError
from mmzero.policies import Unit

FORWARD, METHOD, LEFT = 'f', 'm', '.'
_ENTRY = '_mmzero_take_part'


class Following:
    """Notes the order in which forwards run units, and runs through it where another rank has a forward.

    Args:
        units (Sequence[tuple[nn.Module, Unit]]): Sharded modules and their units.
        loop (Loop): The loop over val or test data.
        present (Sequence[bool]): Which ranks have a batch.
    """

    def __init__(self, units: Sequence[tuple[Any, Unit]], loop: Loop, present: Sequence[bool]) -> None:
        self.units = units
        self.loop = loop
        self.present = present
        self.key = f'{loop.key}/units'
        self.is_present = present[dist.get_rank()]
        self.tells = self.is_present and not all(present) and present.index(True) == dist.get_rank()
        self.order: list[str] | None = None
        self.varies = False
        self._inside = [0] * len(units)
        self._now: list[str] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note the units that forwards run.

        Yields:
            None: Forwards inside are noted.
        """
        with ExitStack() as stack:
            for index, (module, unit) in enumerate(self.units):
                # Before FSDP2's own hooks, which communicate.
                enter, leave = self._hooks(index)
                stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
                for name in unit.methods:
                    stack.enter_context(patch.object(module, name, self._around(index, getattr(module, name))))
            yield

    def _hooks(self, index: int) -> tuple[Callable, Callable]:
        return lambda *_: self._enter(index, FORWARD), lambda *_: self._leave(index)

    def _around(self, index: int, method: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._inside[index]:
                # Within the unit a method is plain.
                return method(*args, **kwargs)
            self._enter(index, METHOD)
            try:
                return method(*args, **kwargs)
            finally:
                self._leave(index)

        return run

    def _enter(self, index: int, way: str) -> None:
        if not any(self._inside):
            self._now = []
            started(f'its next forward in {self.loop.kind}')
        self._inside[index] += 1
        self._note(f'{way}{index}')

    def _leave(self, index: int) -> None:
        self._inside[index] -= 1
        self._note(LEFT)
        if not any(self._inside):
            self.varies = self.varies or self.order not in (None, self._now)
            self.order = self._now

    def _note(self, word: str) -> None:
        if self.tells and self.order is None:
            default_store().set(f'{self.key}/{len(self._now)}', word)
        self._now.append(word)

    def follow(self) -> None:
        """Take part in a forward that another rank runs.

        Raises:
            PlanError: If it is not known which units it runs.
        """
        if self.varies or (self.order is None and all(self.present)):
            raise PlanError(
                f'rank {dist.get_rank()} has no more batches in {self.loop.kind}, and cannot take part in the forwards '
                'of the other ranks, since the model does not run the same units in the same order for every batch; '
                "give ranks the same number of batches, such as by sampler=dict(type='DefaultSampler', round_up=True)"
            )
        started(f'its next forward in {self.loop.kind}')
        told: list[str] = []
        with torch.no_grad():
            self._take_part(iter(self.order) if self.order is not None else self._listen(told))
        self.order = self.order or told

    def _take_part(self, words: Iterator[str], is_top: bool = True) -> None:
        for word in words:
            if word == LEFT:
                return
            index, by_method = int(word[1:]), word[0] == METHOD
            self._go_through(self.units[index][0], by_method, words)
            if is_top:
                return

    def _go_through(self, module: Any, by_method: bool, words: Iterator[str]) -> None:
        """Gather a unit, take part in what is run within it, and free it, as its forward or a method would."""

        def within() -> None:
            # [Note: methods of a unit]
            with kept_gathered(module) if by_method else nullcontext():
                self._take_part(words, is_top=False)

        setattr(module, _ENTRY, within)
        register_fsdp_forward_method(module, _ENTRY)
        entry = getattr(module, _ENTRY)
        delattr(module, _ENTRY)
        entry()

    def _listen(self, told: list[str]) -> Iterator[str]:
        """Hear the words of the rank that tells them; ends after the one that leaves the outermost unit."""
        depth = 0
        while not told or depth:
            word = self._hear(f'{self.key}/{len(told)}')
            told.append(word)
            depth += -1 if word == LEFT else 1
            yield word

    def _hear(self, key: str) -> str:
        teller = self.present.index(True)
        for _ in looks():
            if default_store().check([key]):
                return default_store().get(key).decode()
            raise_of_failed(places([teller]))
        raise PlanError(
            f'rank {dist.get_rank()} has no batch in {self.loop.kind}, and rank {teller}, which has some, did not say '
            f'within {group_timeout()} which units it runs'
        )
