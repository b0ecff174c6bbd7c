"""Kinds of parameters: those whose tensors torch's kernels for lists of tensors take together."""

from collections import defaultdict
from collections.abc import Hashable, Iterable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def kind_of(tensor: Tensor) -> Hashable:
    """Tell kinds apart: whole tensors, and shards by their mesh and placements.

    Args:
        tensor (Tensor): A parameter or a gradient.

    Returns:
        Hashable: Equal for tensors of one kind.
    """
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def by_kind(params: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by kind, in their order.

    Args:
        params (Iterable[nn.Parameter]): The parameters.

    Returns:
        list[list[nn.Parameter]]: The groups.
    """
    kinds: dict[Hashable, list[nn.Parameter]] = defaultdict(list)
    for param in params:
        kinds[kind_of(param)].append(param)
    return list(kinds.values())
