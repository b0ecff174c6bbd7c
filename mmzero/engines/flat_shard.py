"""A shard that is a run of a tensor's elements, as torch's distributed checkpoint writes and reads it.

[Note: a run as boxes]
DCP knows boxes: an offset and a size for each dimension. A run of a flattened tensor, from anywhere to anywhere, is the
rest of a row, whole rows and the start of a row, and within a part of a row the same again: at most 2n - 1 boxes in n
dimensions. Each is contiguous in the run, so nothing is copied. DCP cuts boxes by boxes: what was saved in runs is read
by rows, as FSDP2 cuts, and the other way round.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


class FlatShard(Tensor):
    """A run of a tensor's elements in row-major order, under the shape of the whole; nothing is computed with it.

    It fulfils the protocol by which DCP takes DTensors (``torch.distributed._checkpointable``).

    Args:
        part (Tensor): The run, flat and contiguous; what is loaded goes into its memory.
        start (int): Where in the flattened tensor it begins.
        shape (Sequence[int]): The whole tensor's.
    """

    part: Tensor
    start: int

    @staticmethod
    def __new__(cls, part: Tensor, start: int, shape: Sequence[int]) -> 'FlatShard':
        """Make one of the class's arguments."""
        made = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=part.dtype, device=part.device)
        made.part, made.start = part.detach(), start
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse every operator.

        Raises:
            TypeError: Always.
        """
        raise TypeError(f'{func} of a FlatShard: it is a part of a checkpoint, and computes nothing')

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Name the run."""
        return f'FlatShard({self.start} to {self.start + self.part.numel()} of {tuple(self.shape)}, {self.dtype})'

    def _pieces(self) -> dict[tuple[int, ...], tuple[tuple[int, ...], int]]:
        """By offsets of a box its sizes, and where in the run it begins."""
        found, done = {}, 0
        for offsets, sizes in boxes(self.shape, self.start, self.start + self.part.numel()):
            found[offsets] = (sizes, done)
            done += math.prod(sizes)
        return found

    def on_host(self) -> 'FlatShard':
        """Copy it to the host."""
        return FlatShard(self.part.to('cpu', copy=True), self.start, self.shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The boxes, as DCP reads into them."""
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, (sizes, _) in self._pieces().items()
        ]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """The boxes, as DCP writes them.

        Args:
            fqn (str): The tensor's name.
        """
        properties = TensorProperties.create_from_tensor(self.part)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """A box: a view of the run.

        Args:
            index (MetadataIndex): Its offsets.

        Raises:
            ValueError: If there is none.
        """
        found = None if index.offset is None else self._pieces().get(tuple(index.offset))
        if found is None:
            raise ValueError(f'no box at {index.offset} in elements {self.start} to {self.start + self.part.numel()}')
        sizes, start = found
        return self.part.narrow(0, start, math.prod(sizes)).view(sizes)


SHARDS = (DTensor, FlatShard)
"""The classes of shards."""


def is_meta(value: Any) -> bool:
    """Say whether something is a tensor without content."""
    return isinstance(value, Tensor) and value.is_meta


def boxes(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """Cut a run of a flattened tensor into boxes, in the run's order.

    Args:
        shape (Sequence[int]): The tensor's.
        start (int): The run's first element.
        end (int): The element behind its last.

    Yields:
        tuple: Offsets and sizes by dimension.
    """
    if start == end:
        return
    if len(shape) < 2:
        yield tuple(start for _ in shape), tuple(end - start for _ in shape)
        return
    row = math.prod(shape[1:])
    while start < end:
        number, within = divmod(start, row)
        rows = (end - start) // row
        if within == 0 and rows > 0:
            yield (number, *(0 for _ in shape[1:])), (rows, *shape[1:])
            start += rows * row
        else:
            stop = min(end, (number + 1) * row)
            for offsets, sizes in boxes(shape[1:], within, within + stop - start):
                yield (number, *offsets), (1, *sizes)
            start = stop
