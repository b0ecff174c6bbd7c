"""In which dtypes a step really computes: the operators below autocast, and what goes into and out of modules."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

# (operator or module's path, dtypes in, dtypes out): how often.
Seen = Counter[tuple[str, tuple[str, ...], tuple[str, ...]]]


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix('torch.')


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in nested containers, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from tensors_in(item)


def dtypes_of(value: Any) -> tuple[str, ...]:
    """The dtypes of tensors in nested containers, each once, by name."""
    return tuple(sorted({short(tensor.dtype) for tensor in tensors_in(value)}))


class Operators(TorchDispatchMode):
    """Records the dtypes of the first input and of the first output of operators, as they are after autocast."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = names
        self.seen: Seen = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in self.names:
            into, out = next(tensors_in(args)), next(tensors_in(found))
            self.seen[name, (short(into.dtype),), (short(out.dtype),)] += 1
        return found


@contextmanager
def modules_seen(model: nn.Module, wanted: Sequence[type | str]) -> Iterator[Seen]:
    """Record the dtypes into and out of modules of some classes, by the class's name before sharding.

    Args:
        model (nn.Module): The model itself.
        wanted (Sequence[type | str]): Classes, or names of classes.

    Yields:
        Seen: By class.
    """
    seen: Seen = Counter()
    handles = []
    for module in model.modules():
        for cls in type(module).__mro__:
            if cls.__name__ in wanted or cls in wanted:

                def note(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = cls.__name__) -> None:
                    seen[name, dtypes_of([args, kwargs]), dtypes_of(output)] += 1

                handles.append(module.register_forward_hook(note, with_kwargs=True))
                break
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
