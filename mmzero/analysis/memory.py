"""What memory is for while a step runs."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function

from mmzero._compat import use_count
from mmzero.analysis.blocks import NOTE, Event, Note, read_events, timeline, trace_blocks
from mmzero.policies import WrapPlan

STATES = ('parameters', 'gradients', 'optimizer', 'gathered', 'in flight')
"""What ZeRO is about: shards of parameters, gradients whole and sharded, optimizer state, gathered parameters, and the
buffers of collectives that are under way. Activations are counted apart, and so is what gloo copies for itself,
'backend'."""

# torch 2.13 renamed them.
_COLLECTIVES = ('all_gather_single', 'all_gather_into_tensor', 'reduce_scatter_single', 'reduce_scatter_tensor')


@dataclass(frozen=True)
class StepMemory:
    """Bytes over a step, from the start of the first forward to the end of the last backward.

    Args:
        series (dict[str, list[int]]): Category to bytes after each allocator event.
    """

    series: dict[str, list[int]]

    @property
    def states(self) -> list[int]:
        """Bytes of all of :data:`STATES` together, after each event."""
        parts = [self.series[name] for name in STATES if name in self.series]
        return [sum(values) for values in zip(*parts, strict=True)]

    @property
    def everything(self) -> list[int]:
        """Bytes of all categories together, activations too, after each event; not a backend's own copies."""
        parts = [values for name, values in self.series.items() if name != 'backend']
        return [sum(values) for values in zip(*parts, strict=True)]

    def at_peak(self) -> dict[str, int]:
        """Bytes by category at the moment when the states together take most.

        Returns:
            dict[str, int]: Every category of :data:`STATES` and the others.
        """
        states = self.states
        moment = states.index(max(states))
        found = {name: values[moment] for name, values in self.series.items()}
        return {**dict.fromkeys(STATES, 0), **found}

    def peaks(self) -> dict[str, int]:
        """The most bytes of each category, each at a moment of its own.

        Returns:
            dict[str, int]: As :meth:`at_peak`.
        """
        return {**dict.fromkeys(STATES, 0), **{name: max(values) for name, values in self.series.items()}}


class MemoryRecorder:
    """Records the blocks of memory of one optimizer step.

    Args:
        model (nn.Module): The sharded model.
        plan (WrapPlan): Its units.
        optimizer (Optimizer): The optimizer that is stepped.
    """

    def __init__(self, model: nn.Module, plan: WrapPlan, optimizer: Optimizer) -> None:
        self.model = model
        self.plan = plan
        self.optimizer = optimizer
        self.notes: list[Note] = []
        self.memory = StepMemory({})

    @contextmanager
    def record(self, optim_wrapper: Any) -> Iterator[None]:
        """Record until the optimizer is about to step.

        Args:
            optim_wrapper (OptimWrapper): Its ``step`` marks the end of the last backward.

        Yields:
            None: Forwards and backwards of one optimizer step run inside.
        """
        before = self._lasting()
        step, ends = optim_wrapper.step, []

        def note_end(**kwargs: Any) -> None:
            ends.append(len(self.notes))
            self._note(self._lasting())
            step(**kwargs)

        with ExitStack() as stack:
            handles = self._watch_gradients()
            # More come while the step runs.
            stack.callback(lambda: [handle.remove() for handle in handles])
            optim_wrapper.step = note_end
            stack.callback(lambda: vars(optim_wrapper).pop('step'))
            stack.enter_context(_released_in_time())
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                yield
        if not ends:
            raise RuntimeError('the optimizer did not step while memory was recorded')
        self.memory = self._evaluate(read_events(profiler), before, ends[0])

    def _evaluate(self, events: list[Event], before: dict[int, tuple[int, str]], end: int) -> StepMemory:
        marks = [index for index, event in enumerate(events) if event.category == NOTE]
        blocks = trace_blocks(events, before, self.notes)
        return StepMemory({name: values[: marks[end]] for name, values in timeline(blocks, len(events)).items()})

    def _lasting(self) -> dict[int, tuple[int, str]]:
        """Address to size and category of what parameters, gradients and the optimizer hold now."""
        params = [param for group in self.optimizer.param_groups for param in group['params']]
        known = {id(param): param for param in (*self.model.parameters(), *params)}.values()
        kinds: list[tuple[str, Iterable[Any]]] = [
            ('parameters', known),
            ('gradients', [param.grad for param in known]),
            ('optimizer', [value for state in self.optimizer.state.values() for value in state.values()]),
        ]
        found: dict[int, tuple[int, str]] = {}
        for name, tensors in kinds:
            for tensor in tensors:
                if isinstance(tensor, Tensor):
                    storage = _local(tensor).untyped_storage()
                    found[storage.data_ptr()] = (storage.nbytes(), name)
        return found

    def _note(self, note: Note) -> None:
        self.notes.append(note)
        with record_function(NOTE):
            pass

    def _watch_gradients(self) -> list[Any]:
        """Note each gradient when autograd has accumulated it, also those of gathered parameters."""
        handles: list[Any] = []
        seen: set[int] = set()

        def accumulated(param: Tensor) -> None:
            if param.grad is not None:
                storage = _local(param.grad).untyped_storage()
                self._note({storage.data_ptr(): (storage.nbytes(), 'gradients')})

        def watch(param: nn.Parameter) -> None:
            if param.requires_grad and id(param) not in seen:
                seen.add(id(param))
                handles.append(param.register_post_accumulate_grad_hook(accumulated))

        for unit in self.plan.units:
            params = unit.params

            def gathered(module: nn.Module, args: tuple, params: tuple[str, ...] = params) -> None:
                for name in params:
                    path, _, attribute = name.rpartition('.')
                    watch(getattr(self.model.get_submodule(path), attribute))

            handles.append(self.model.get_submodule(unit.name).register_forward_pre_hook(gathered))
        return handles


@contextmanager
def _released_in_time() -> Iterator[None]:
    """Let collectives return once the backend has let go of their tensors.

    A thread of gloo's holds them for a moment longer, and what it frees last the profiler does not see.

    Yields:
        None: Inside, FSDP2's collectives behave so.
    """
    with ExitStack() as stack:
        for name in _COLLECTIVES:
            if hasattr(dist, name):
                stack.enter_context(patch.object(dist, name, _waiting(getattr(dist, name))))
        yield


def _waiting(collective: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        before = [use_count(tensor) for tensor in tensors]
        work = collective(*args, **kwargs)
        latest = time.monotonic() + 1
        while work is None and time.monotonic() < latest:
            if all(use_count(tensor) <= count for tensor, count in zip(tensors, before, strict=True)):
                break
            time.sleep(0.0005)
        return work

    return call


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
