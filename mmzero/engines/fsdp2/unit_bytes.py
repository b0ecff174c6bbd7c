"""The tensors of a unit that come and go during a step, in bytes, and its place in the tree of units."""

from dataclasses import dataclass

from mmzero.policies import Unit


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of one unit's tensors.

    Args:
        gathered (int): Its gathered parameters, padded.
        cast (int): The input of its all-gather, where that is a copy in another dtype.
        reduced (int): The input of its reduce-scatter, padded.
        output (int): The output of its reduce-scatter.
        sharded (int): Its sharded gradients: the output, or a copy of it in the dtype of the parameters.
        kept (int): Its shards as they are stored.
        largest (int): The largest of them.
    """

    gathered: int
    cast: int
    reduced: int
    output: int
    sharded: int
    kept: int
    largest: int


@dataclass(frozen=True)
class UnitLayout:
    """How one unit is gathered and reduced.

    Args:
        shard_size (int): Ranks that share its parameters.
        itemsize (int, optional): Bytes per gathered element; None: as stored.
        reduce_itemsize (int, optional): Bytes per reduced element; None: as gathered.
        reshard_after_forward (bool or int): What becomes of its gathered parameters after forward.
        is_replicated (bool): Whether several ranks keep the same shard of it.
        is_on_host (bool): Whether shards lie in host memory. Defaults to False.
    """

    shard_size: int
    itemsize: int | None
    reduce_itemsize: int | None
    reshard_after_forward: bool | int
    is_replicated: bool
    is_on_host: bool = False

    @property
    def backward_size(self) -> int:
        """Ranks among which backward gathers; 1 where the parameters are still gathered."""
        if isinstance(self.reshard_after_forward, bool):
            return self.shard_size if self.reshard_after_forward else 1
        return self.reshard_after_forward

    @property
    def is_gathered_again(self) -> bool:
        """Whether backward gathers what forward has freed."""
        return self.reshard_after_forward is not False and (self.backward_size > 1 or self.shard_size == 1)


class UnitNode:
    """A unit with its place in the tree of units.

    Args:
        unit (Unit): The unit.
        layout (UnitLayout): How it is gathered and reduced.
    """

    def __init__(self, unit: Unit, layout: UnitLayout) -> None:
        self.unit, self.layout, shard_size = unit, layout, layout.shard_size
        itemsize = layout.itemsize
        self.itemsizes = unit.itemsizes if itemsize is None else (itemsize,) * len(unit.itemsizes)
        self.reduce_itemsize = layout.reduce_itemsize or max(self.itemsizes, default=4)
        kept = [0 if whole else n for n, whole in zip(unit.kept_numels(shard_size), unit.is_whole, strict=True)]
        trained = sum(n for n, train in zip(kept, unit.trainable, strict=True) if train)
        gathered = sum(n * size for n, size in zip(kept, self.itemsizes, strict=True))
        self.is_cast = self.itemsizes != unit.itemsizes
        self.bytes = UnitBytes(
            gathered=gathered * shard_size,
            cast=gathered if self.is_cast and shard_size > 1 else 0,
            reduced=trained * shard_size * self.reduce_itemsize,
            output=trained * self.reduce_itemsize,
            sharded=sum(n * size for n, size, train in zip(kept, unit.itemsizes, unit.trainable, strict=True) if train),
            kept=sum(stored := [n * size for n, size in zip(kept, unit.itemsizes, strict=True)]),
            largest=max(stored, default=0),
        )
        self.flat = self.bytes.gathered if shard_size > 1 else 0
        across = self._split_across()
        self.rearranged = sum(across)
        self.largest_across, self.last_across = max(across, default=0), across[-1] if across else 0
        self.children: list[UnitNode] = []
        self.is_gathered = self.is_fetched = False
        self.resharded = 0
        self.whole_gradients = 0
        self.has_sharded_gradients = False

    def _split_across(self) -> list[int]:
        """Gathered bytes of each parameter that is split along another dimension than the first.

        FSDP2 brings these into order by a copy: all of a unit after its all-gather, one gradient after the other
        before its reduce-scatter, of which the last stays until that is over.
        """
        if self.layout.shard_size == 1:
            return []
        dims = self.unit.shard_dims(self.layout.shard_size)
        return [self.gradient_bytes(index) for index, dim in enumerate(dims) if dim]

    def members(self) -> list[tuple[int, 'int | UnitNode']]:
        """Own parameters and units inside, in the order of registration."""
        own: list[tuple[int, int | UnitNode]] = [
            (place, index) for index, place in enumerate(self.unit.places) if self.unit.trainable[index]
        ]
        inside = [(child.first_place(), child) for child in self.children]
        return sorted([*own, *inside], key=lambda item: item[0])

    def first_place(self) -> int:
        """Where its first parameter is registered, or that of a unit inside."""
        return min([*self.unit.places, *(child.first_place() for child in self.children)])

    def gradient_bytes(self, index: int) -> int:
        """Bytes of the whole gradient of one of its own parameters, in the dtype of the gathered unit."""
        numel = 1
        for size in self.unit.shapes[index]:
            numel *= size
        return numel * self.itemsizes[index]
