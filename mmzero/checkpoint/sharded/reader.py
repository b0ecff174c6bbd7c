"""DCP's reader, which runs nothing that a file names."""

import math
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.futures import Future
from typing_extensions import override

from mmzero._compat import dcp_pickle_globals, return_freed_memory

METADATA = '.metadata'
"""DCP's own name of its index."""

_PART_NUMEL = 2**20


class SafeReader(FileSystemReader):
    """FileSystemReader, whose own unpickling of ``.metadata`` would run whatever the file names.

    Tensors it reads by ``torch.load(weights_only=True)`` as it is; of bytes, which it would unpickle as well, our
    checkpoints have none.
    """

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / METADATA, 'rb') as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f'.metadata holds a {type(metadata).__name__}')
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        # torch's loop holds what it read last until the next one is there, which doubles the memory of large tensors.
        for items in _in_parts(plan.items):
            super().read_data(replace(plan, items=items), planner).wait()
            return_freed_memory()
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _in_parts(items: list[ReadItem]) -> Iterator[list[ReadItem]]:
    part: list[ReadItem] = []
    numel = 0
    for item in items:
        numel += math.prod(item.lengths)
        if part and numel > _PART_NUMEL:
            yield part
            part, numel = [], math.prod(item.lengths)
        part.append(item)
    yield part


class _Unpickler(pickle.Unpickler):
    @override
    def find_class(self, module_name: str, global_name: str) -> Any:
        known = dcp_pickle_globals()
        if (module_name, global_name) not in known:
            raise pickle.UnpicklingError(f'.metadata names {module_name}.{global_name}, which is not read')
        return known[module_name, global_name]
