"""DCP's reader, which runs nothing that a file names."""

import pickle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from typing_extensions import override

from mmzero._compat import dcp_pickle_globals

METADATA = '.metadata'
"""DCP's own name of its index."""


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


class _Unpickler(pickle.Unpickler):
    @override
    def find_class(self, module_name: str, global_name: str) -> Any:
        known = dcp_pickle_globals()
        if (module_name, global_name) not in known:
            raise pickle.UnpicklingError(f'.metadata names {module_name}.{global_name}, which is not read')
        return known[module_name, global_name]
