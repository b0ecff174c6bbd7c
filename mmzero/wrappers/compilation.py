"""Compiling the units of a plan, and telling once what became of it."""

import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from traceback import FrameSummary

import torch
import torch.distributed.fsdp
from torch import nn

import mmzero.patches
from mmzero._compat import compiler_errors, graph_breaks, is_of_compiled_backward
from mmzero.config import CompileConfig
from mmzero.engines.eagerly import eagerly
from mmzero.engines.watch import COMPILING
from mmzero.errors import CompileError, ZeroError
from mmzero.patches import Region, compile_alike, compile_error
from mmzero.policies import Unit, WrapPlan

# The first runs eagerly, the second compiles, and the third may bring other sizes.
TOLD_AFTER = 3
SHOWN_BREAKS = 10


class Compilation:
    """The compiled units of one model.

    [Note: the first iteration is not compiled]
    Where parameters are shards, the first iteration of each kind looks at every operation and at the order of units.
    What is compiled meanwhile would be compiled again without that, and a compiler's errors would hide those of
    sharding. So it runs eagerly, with its backward, in which regions that hold units are recomputed. So do the
    iterations in which a budget measures what is kept.

    Args:
        model (nn.Module): The model, patched and not sharded yet.
        plan (WrapPlan): Its units.
        config (CompileConfig): The field ``compile``.
        regions (Mapping[str, Region]): What is recomputed, by path.
        report (Callable): Takes a text for the log, and whether it is a warning.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: WrapPlan,
        config: CompileConfig,
        regions: Mapping[str, Region],
        report: Callable[[str, bool], None],
    ) -> None:
        self.config = config
        self._report = report
        self._steps = 0
        self._is_announced = False
        self.units = [
            note
            for number, names in enumerate(_alike(plan))
            for note in compile_alike({name: model.get_submodule(name) for name in names}, config, regions, number)
        ]
        if self.units:
            COMPILING.start()
            self._before = COMPILING.count, COMPILING.again, COMPILING.seconds
            stacks, reasons = graph_breaks()
            self._seen = len(stacks), set(reasons)

    def running(self, is_first: bool) -> AbstractContextManager:
        """What an iteration runs in.

        Args:
            is_first (bool): Whether it is to be looked at, and not to be compiled.

        Returns:
            AbstractContextManager: The context.
        """
        if is_first:
            return eagerly()
        if not self.units:
            return nullcontext()
        if not self._is_announced:
            self._is_announced = True
            self._report(f'compile: compiling {len(self.units)} units, which may take minutes', False)
        return self._explained()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Backwards are compiled in backward, where no unit is known."""
        try:
            yield
        except compiler_errors() as error:
            if isinstance(error, ZeroError):
                raise
            raise compile_error('a unit, or its backward', '**', self.config, error) from error
        except RuntimeError as error:
            if not is_of_compiled_backward(error):
                raise
            raise self._once_alone(error) from error

    def _once_alone(self, error: RuntimeError) -> CompileError:
        """What a penalty on gradients asks of a backward that was compiled, or a second backward of one graph."""
        return CompileError(
            f'model_wrapper_cfg.compile: backend {self.config.backend_name!r} compiles backwards, which cannot be '
            'differentiated (create_graph=True, as for a penalty on gradients), and those of inductor cannot run twice '
            '(retain_graph=True); leave the units of that network out by model_wrapper_cfg.overrides='
            "[dict(units='NAME', compile=False)], use backend='eager', which leaves backwards to autograd, or remove "
            'compile. '
            f'It says: {error}'
        )

    def after_step(self) -> None:
        """Tell once, after the first iterations, what was compiled and where graphs break."""
        self._steps += 1
        if self.units and self._steps == TOLD_AFTER:
            self._report(self._text(), bool(self._breaks()) or bool(self._idle()))

    def _idle(self) -> list[str]:
        return [unit.name or '(root)' for unit in self.units if not unit.has_run]

    def _breaks(self) -> Counter[str]:
        """Places and reasons, and how often a function was cut there."""
        stacks, reasons = graph_breaks()
        seen_stacks, seen_reasons = self._seen
        new = stacks[seen_stacks:]
        found = Counter(_told(stack, reason) for stack, reason in new)
        # A function that Dynamo leaves out as a whole, as for a graph break in a loop, has no stack in the list.
        placed = ''.join(reason for _, reason in new)
        found.update(_said(reason) for reason in reasons if reason not in seen_reasons and reason not in placed)
        return found

    def _text(self) -> str:
        count, again, seconds = (
            now - before
            for now, before in zip((COMPILING.count, COMPILING.again, COMPILING.seconds), self._before, strict=True)
        )
        classes = Counter(unit.class_name for unit in self.units)
        units = ', '.join(f'{number} x {name}' for name, number in classes.items())
        breaks, idle = self._breaks(), self._idle()
        text = (
            f'compile: {units} by {self.config.backend_name}: {count} functions in {seconds:.0f} s on this rank, '
            f'{again} of them compiled again for other inputs; '
        )
        text += f'graph breaks at {len(breaks)} place(s)' if breaks else 'no graph breaks'
        lines = [f'  {place} (x {times})' for place, times in breaks.most_common(SHOWN_BREAKS)]
        if len(breaks) > SHOWN_BREAKS:
            lines.append(f'  and {len(breaks) - SHOWN_BREAKS} more: TORCH_LOGS=graph_breaks shows them')
        if breaks:
            lines.append('  each cuts a unit in parts; model_wrapper_cfg.overrides leaves units out by compile=False')
        if idle:
            lines.append(
                f'  never called, so that nothing is compiled: {", ".join(idle)}; they are entered by other methods '
                'than forward, or not at all'
            )
        return '\n'.join([text, *lines])


def _alike(plan: WrapPlan) -> list[list[str]]:
    groups: dict[tuple, list[str]] = {}
    for unit in plan.units:
        if unit.compiled:
            groups.setdefault(_kind(unit), []).append(unit.name)
    return list(groups.values())


def _kind(unit: Unit) -> tuple:
    return unit.class_name, unit.shapes, unit.trainable, unit.dtypes, unit.rules


def _told(stack: Sequence[FrameSummary], reason: str) -> str:
    """A graph break, by the innermost line of the model's own code."""
    if not stack:
        return _said(reason)
    own = [frame for frame in stack if _is_of_models(frame.filename)]
    place = (own or stack)[-1]
    where = f'{place.filename}:{place.lineno} ({place.name})'
    if stack[-1].filename.startswith(_FSDP):
        return f'{where}: a unit within this one is gathered here'
    return f'{where}: {_first_line(reason)}'


def _is_of_models(file: str) -> bool:
    is_pythons = file.startswith(('<', _PYTHON)) and 'site-packages' not in file
    return not is_pythons and not file.startswith(_NOT_OF_MODELS)


_PYTHON = f'{sysconfig.get_path("stdlib")}{os.sep}'
_NOT_OF_MODELS = tuple(f'{package.__path__[0]}{os.sep}' for package in (torch, mmzero.patches))
_FSDP = f'{torch.distributed.fsdp.__path__[0]}{os.sep}'


def _first_line(reason: str) -> str:
    """The first line of a reason that says something about it."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    told = [line for line in lines if not line.endswith(':') and 'encountered graph break' not in line.lower()]
    return (told or lines or [''])[0]


def _said(reason: str) -> str:
    """What a reason without a place says, with the function that it names."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    context = [line for line in lines if line.startswith('Developer debug context:')]
    return f'{_first_line(reason)} ({context[0].partition(":")[2].strip()})' if context else _first_line(reason)
