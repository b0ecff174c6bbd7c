"""What the modules that may be recomputed do in one forward."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from mmzero.patches.cheapest import Measured
from mmzero.patches.checkpoint import Observe
from mmzero.patches.kept import KeptBytes
from mmzero.patches.offload import bytes_of


@dataclass(frozen=True)
class Summary:
    """One forward of a model on one rank.

    Args:
        modules (dict[str, Measured]): By path, in the order of forward.
        other (int): Bytes kept for backward that belong to none of the modules alone.
    """

    modules: dict[str, Measured]
    other: int


class _Calls:
    """The forwards of one module."""

    def __init__(self) -> None:
        self.inputs: dict[int, int] = {}
        self.kept_inputs: list[tuple[int, int]] = []
        self.kept = 0
        self.at_once = 0
        self.largest = 0
        self.seconds = 0.0


class Observation:
    """Watches the forward of a model in which all of some modules are recomputed."""

    def __init__(self) -> None:
        self._calls: dict[str, _Calls] = {}
        self._kept = KeptBytes()

    def forward(self) -> AbstractContextManager:
        """The context of the model's forward.

        Returns:
            AbstractContextManager: The context.
        """
        return self._kept.counting()

    @property
    def kept(self) -> int:
        """Bytes that are kept once the forward has ended."""
        return self._kept.total

    def of(self, name: str) -> Observe:
        """What ``Region.observe`` of a module takes.

        Args:
            name (str): Its path.

        Returns:
            Callable: From the tensors that the module gets to the contexts of a forward and of its recompute.
        """
        return lambda tensors: (self._observing(name, tensors), nullcontext())

    @contextmanager
    def _observing(self, name: str, tensors: list[Tensor]) -> Iterator[None]:
        inputs, inside = KeptBytes(), KeptBytes(holds=True)
        for tensor in tensors:
            inputs.add(tensor)
        _wait_for(tensors)
        start = time.perf_counter()
        with inside.counting():
            yield
        _wait_for(tensors)
        calls = self._calls.setdefault(name, _Calls())
        calls.seconds += time.perf_counter() - start
        calls.inputs.update(inputs.sizes)
        calls.kept_inputs += [(key, size) for key, size in inside.sizes.items() if key in inputs.sizes]
        calls.kept += inside.total
        calls.at_once = max(calls.at_once, inside.total)
        calls.largest = max(calls.largest, sum(map(bytes_of, tensors)))

    def summary(self) -> Summary:
        """Say what was seen, once the forward has ended.

        Returns:
            Summary: A tensor that several modules get, such as the memory of a decoder, belongs to none of them.
        """
        users = Counter(key for calls in self._calls.values() for key in calls.inputs)
        modules = {}
        for name, calls in self._calls.items():
            # What is offloaded is not among what is kept.
            inputs = sum(size for key, size in calls.inputs.items() if users[key] == 1 and key in self._kept.sizes)
            shared = sum(size for key, size in calls.kept_inputs if users[key] > 1)
            modules[name] = Measured(name, inputs, calls.kept - shared, calls.at_once, calls.seconds, calls.largest)
        other = self._kept.total - sum(module.inputs for module in modules.values())
        return Summary(modules, max(other, 0))


def _wait_for(tensors: list[Tensor]) -> None:
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def combine(ranks: list[list[Summary]]) -> tuple[list[Measured], int]:
    """Take the largest figures of all ranks and iterations, and the usual time of a module.

    Args:
        ranks (list[list[Summary]]): By rank, by iteration.

    Returns:
        tuple[list[Measured], int]: The modules in the order of the first rank that ran them, and the other bytes.
    """
    names = dict.fromkeys(name for summaries in ranks for one in summaries for name in one.modules)
    combined = []
    for name in names:
        of_ranks = [[one.modules[name] for one in summaries if name in one.modules] for summaries in ranks]
        all_of_them = [module for modules in of_ranks for module in modules]
        # The shortest of a rank's: the first iteration warms up.
        times = [min(module.seconds for module in modules) for modules in of_ranks if modules]
        combined.append(
            Measured(
                name,
                max(module.inputs for module in all_of_them),
                max(module.kept for module in all_of_them),
                max(module.at_once for module in all_of_them),
                sum(times) / len(times),
                max(module.largest for module in all_of_them),
            )
        )
    return combined, max(one.other for summaries in ranks for one in summaries)
