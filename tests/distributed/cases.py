"""Many small cases in one spawn: each rank runs them in the same order and says what went wrong in which."""

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Faults = dict[str, list[str]]

opened: Counter[str] = Counter()
"""How often this process opened a file, by path; counted from the first :func:`count_opened_files` on."""


def merged(ranks: list[Faults]) -> Faults:
    """Join the ranks' findings."""
    names = list(ranks[0])
    assert all(list(found) == names for found in ranks), 'the ranks did not run the same cases'
    return {name: [f'rank {i}: {text}' for i, found in enumerate(ranks) for text in found[name]] for name in names}


def by_stage(cases: Sequence[Callable[[str, int], list[str]]], stages: Sequence[int], folder: str) -> Faults:
    """Run each case at each stage, in a folder of its own."""
    return {
        f'{case.__name__} {stage}': case(f'{folder}/{case.__name__}/{stage}', stage)
        for case in cases
        for stage in stages
    }


def same_on_all_ranks(tensors: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor] | None = None) -> list[str]:
    """Compare tensors, to the bit, with rank 0's, or with what rank 0 was given. Collective."""
    box = [_described(wanted or tensors)]
    dist.broadcast_object_list(box, src=0)
    return _differences(_described(tensors), box[0])


def differing(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is missing or differs by a bit."""
    return _differences(_described(found), _described(wanted))


def _described(tensors: dict[str, torch.Tensor]) -> dict[str, tuple]:
    return {name: (str(value.dtype), tuple(value.shape), _bits(value)) for name, value in tensors.items()}


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _differences(found: dict[str, tuple], wanted: dict[str, tuple]) -> list[str]:
    faults = [f'{name} is on one side only' for name in wanted.keys() ^ found.keys()]
    return faults + [f'{name} differs' for name in wanted.keys() & found.keys() if found[name] != wanted[name]]


def count_opened_files() -> None:
    """Count from now on; an audit hook stays for the life of the process."""

    def note(event: str, args: tuple) -> None:
        if event == 'open' and isinstance(args[0], (str, os.PathLike)):
            opened[os.fspath(args[0])] += 1

    sys.addaudithook(note)


@contextmanager
def refused(faults: list[str], error: type[Exception], *parts: str) -> Iterator[None]:
    """Note where an error does not come or does not say something."""
    try:
        yield
    except error as caught:
        faults += [f'{part!r} is not in: {caught}' for part in parts if part not in str(caught)]
    except Exception as caught:  # noqa: BLE001
        faults.append(f'{type(caught).__name__} instead of {error.__name__}: {caught}')
    else:
        faults.append(f'no {error.__name__}')


@contextmanager
def only_new_objects() -> Iterator[None]:
    """Let :func:`live_bytes` inside look at what is made inside, which is quicker than at everything."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def damage(folder: Path, name: str, how: str) -> None:
    """Take away a file of a checkpoint ('missing') or its last byte ('cut'), or change a bit of it ('flipped')."""
    file = folder / name
    if how == 'missing':
        file.unlink()
        return
    content = bytearray(file.read_bytes())
    if how == 'cut':
        del content[-1]
    else:
        content[len(content) // 2] ^= 1
    file.write_bytes(content)


def live_bytes() -> int:
    """Bytes of all real tensors of this process."""
    storages: dict[int, int] = {}
    for item in gc.get_objects():
        # isinstance would ask proxies for their class.
        if issubclass(type(item), torch.Tensor) and not item.is_meta:
            local: Any = item.to_local() if hasattr(item, 'to_local') else item
            storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())
