"""What checkpoints may name besides tensors and plain values, and what is made of it. No code of theirs runs."""

import argparse
import pathlib
import pickle
from typing import Any

import numpy as np
from mmengine.logging import HistoryBuffer
from torch import Tensor

from mmzero._compat import numpy_pickle_globals
from mmzero.errors import CheckpointError


class Record:
    """Stands in for an object of torch's, of which it holds what was pickled."""

    state: Any

    def __new__(cls, *args: Any) -> 'Record':  # noqa: D102
        made = super().__new__(cls)
        made.state = args
        return made

    def __setstate__(self, state: Any) -> None:
        # Of a class with slots it is a pair.
        self.state = state[1] if isinstance(state, tuple) and len(state) == 2 and state[0] is None else state


class SavedShards(Tensor):
    """Stands in for torch's ShardedTensor, which is not made without its process group.

    ``shape`` and ``dtype`` are those of the whole. ``parts`` are offsets and tensors of the rank that saved it, and
    ``ranks`` is how many there were.
    """

    parts: list[tuple[list[int], Tensor]]
    ranks: int

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise CheckpointError(f"a rank's shard of a checkpoint cannot take part in {function}")

    def __setstate__(self, state: tuple) -> None:
        shards, _, group, *_ = state
        self.parts = [(shard.state['metadata'].state['shard_offsets'], shard.state['tensor']) for shard in shards]
        self.ranks = group.state['local_world_size']


def _attribute(owner: Any, name: str) -> Any:
    """Stand in for ``getattr``, by which HistoryBuffer's methods and a class of ShardedTensor are named."""
    if owner is HistoryBuffer and name in ('min', 'max', 'mean', 'current'):
        return getattr(owner, name)
    if owner is SavedShards and name == 'ProcessGroupState':
        return Record
    raise pickle.UnpicklingError(f'Unsupported global: getattr of {owner!r} and {name!r}')


_TORCH = 'torch.distributed'
_RECORDS = (
    f'{_TORCH}._shard.sharded_tensor.shard.Shard',
    f'{_TORCH}._shard.sharded_tensor.metadata.ShardedTensorMetadata',
    f'{_TORCH}._shard.sharded_tensor.metadata.TensorProperties',
    f'{_TORCH}._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING',
    f'{_TORCH}._shard.metadata.ShardMetadata',
    f'{_TORCH}._shard.sharding_spec.chunk_sharding_spec.ChunkShardingSpec',
    f'{_TORCH}._shard.sharding_spec.api.EnumerableShardingSpec',
    f'{_TORCH}.remote_device._remote_device',
)

ALLOWED = (
    # MMEngine's own: the message hub's histories, which are numpy arrays.
    HistoryBuffer,
    (_attribute, 'builtins.getattr'),
    np.ndarray,
    np.dtype,
    *numpy_pickle_globals(),
    # FSDPStrategy's shards.
    (SavedShards, f'{_TORCH}._shard.sharded_tensor.api.ShardedTensor'),
    *((Record, name) for name in _RECORDS),
    # Arguments of training scripts, as DeiT, DETR and timm save them.
    argparse.Namespace,
    (pathlib.PurePosixPath, 'pathlib.PosixPath'),
)
