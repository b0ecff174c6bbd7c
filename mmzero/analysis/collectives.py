"""Counting what a step says to other ranks and where it makes host and device wait for each other.

[Note: what a dispatch mode sees]
Every collective of torch is an operator: ``c10d::*`` of ``torch.distributed``, of FSDP2 and of DDP's C++ reducer, and
``_c10d_functional::*`` of DTensor. They all pass through the dispatcher, in forward and, since autograd carries the
dispatch modes into its own threads, in backward. A DTensor has to run before the mode does: an operator on one is
handed back, and what it does underneath comes by.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import Self

from mmzero._compat import TorchDispatchMode, size_of_group
from mmzero.analysis.syncs import HostMethodLog, sync_of


@dataclass(frozen=True)
class Collective:
    """One collective of one rank.

    Args:
        kind (str): 'all_gather', 'reduce_scatter', 'all_reduce', 'broadcast', 'reduce', 'gather', 'scatter',
            'all_to_all', 'send', 'recv', 'barrier', or 'other:' and the operator's name.
        elements (int): Elements of the whole tensor: the output of an all-gather or gather, the input of a
            reduce-scatter or scatter, of an all-to-all what this rank hands in, else the tensor itself. Summed over the
            tensors of a coalesced one; 0 for a barrier.
        itemsize (int): Bytes of an element.
        group_size (int): Ranks that take part.
    """

    kind: str
    elements: int
    itemsize: int
    group_size: int

    @property
    def moved(self) -> float:
        """Elements that a rank sends, as the mean over the group; as many are received.

        With n ranks, (n-1)/n of the elements for all-gather and reduce-scatter and twice that for all-reduce, by the
        ring algorithms, which are optimal (Patarasu and Yuan, 2009). Broadcast and reduce are taken for pipelined
        chains, in which all ranks but one send the tensor: (n-1)/n in the mean. Gather and scatter move n-1 of n parts
        over one rank: (n-1)/n**2. Of an all-to-all, a rank's own part stays. The sender counts for send and recv.
        """
        n = self.group_size
        if self.kind == 'send':
            return float(self.elements)
        if self.kind in ('recv', 'barrier'):
            return 0.0
        share = self.elements * (n - 1) / n
        if self.kind == 'all_reduce':
            return 2 * share
        return share / n if self.kind in ('gather', 'scatter') else share


@dataclass(frozen=True)
class _Rule:
    """How to read an operator: the argument with its tensors, and whether they are one rank's part of the whole."""

    kind: str
    tensors: int = 0
    is_part: bool = False


_RULES = {
    'c10d': dict(
        _allgather_base_=_Rule('all_gather'),
        allgather_=_Rule('all_gather'),
        allgather_coalesced_=_Rule('all_gather'),
        allgather_into_tensor_coalesced_=_Rule('all_gather'),
        _reduce_scatter_base_=_Rule('reduce_scatter', 1),
        reduce_scatter_=_Rule('reduce_scatter', 1),
        reduce_scatter_tensor_coalesced_=_Rule('reduce_scatter', 1),
        allreduce_=_Rule('all_reduce'),
        allreduce_coalesced_=_Rule('all_reduce'),
        broadcast_=_Rule('broadcast'),
        reduce_=_Rule('reduce'),
        # Only the root has the whole.
        gather_=_Rule('gather', 1, is_part=True),
        scatter_=_Rule('scatter', 0, is_part=True),
        alltoall_=_Rule('all_to_all', 1),
        alltoall_base_=_Rule('all_to_all', 1),
        send=_Rule('send'),
        recv_=_Rule('recv'),
        recv_any_source_=_Rule('recv'),
        barrier=_Rule('barrier'),
        monitored_barrier_=_Rule('barrier'),
    ),
    '_c10d_functional': dict(
        all_gather_into_tensor=_Rule('all_gather', is_part=True),
        all_gather_into_tensor_out=_Rule('all_gather', is_part=True),
        all_gather_into_tensor_coalesced=_Rule('all_gather', is_part=True),
        reduce_scatter_tensor=_Rule('reduce_scatter'),
        reduce_scatter_tensor_out=_Rule('reduce_scatter'),
        reduce_scatter_tensor_coalesced=_Rule('reduce_scatter'),
        all_reduce=_Rule('all_reduce'),
        all_reduce_=_Rule('all_reduce'),
        all_reduce_coalesced=_Rule('all_reduce'),
        all_reduce_coalesced_=_Rule('all_reduce'),
        broadcast=_Rule('broadcast'),
        broadcast_=_Rule('broadcast'),
        all_to_all_single=_Rule('all_to_all'),
        isend=_Rule('send'),
        irecv=_Rule('recv'),
    ),
}


class CollectiveLog(TorchDispatchMode):
    """Notes the collectives and the device syncs of what runs inside, on this rank.

    Without an accelerator every sync that one would have counts: reading a number (``item``, ``float``, ``bool``),
    ``nonzero`` and its like, ``cpu``, ``tolist``, ``numpy``. With one, those of tensors on it, and copies between it
    and the host that are not ``non_blocking``.

    Examples:
        >>> with CollectiveLog() as log:
        ...     model.train_step(data, optim_wrapper)
        >>> log.counts(), sum(call.moved for call in log.calls), log.syncs
    """

    calls: list[Collective]
    """The collectives, in order."""
    syncs: Counter[str]
    """Number of device syncs by the operator's or the method's name, 'mask' for an index that is one, 'copy'."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []
        self.syncs = Counter()
        self._methods = HostMethodLog(self.syncs)

    def counts(self) -> dict[str, int]:
        """Number of collectives by kind.

        Returns:
            dict[str, int]: The numbers, sorted by kind.
        """
        return dict(sorted(Counter(call.kind for call in self.calls).items()))

    def __enter__(self) -> Self:
        self._methods.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._methods.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See :class:`torch.utils._python_dispatch.TorchDispatchMode`."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        name = func._schema.name.partition('::')[2]
        if func.namespace in _RULES:
            self.calls += _read(func, name, args)
        elif func.namespace == 'aten':
            sync = sync_of(name, args, kwargs)
            if sync is not None:
                self.syncs[sync] += 1
        return func(*args, **kwargs)


def _read(func: Any, name: str, args: tuple) -> list[Collective]:
    # Defaults at the end may be left out.
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    group = given.get('process_group', given.get('group_name'))
    if group is None:
        # Local, such as waiting for a result.
        return []
    size = size_of_group(group)
    rule = _RULES[func.namespace].get(name)
    tensors = list(_tensors(args if rule is None else args[rule.tensors]))
    elements = sum(tensor.numel() for tensor in tensors)
    itemsize = tensors[0].element_size() if tensors else 1
    if rule is None:
        return [Collective(f'other:{name}', elements, itemsize, size)]
    if rule.kind == 'barrier':
        elements = 0
    return [Collective(rule.kind, elements * size if rule.is_part else elements, itemsize, size)]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
