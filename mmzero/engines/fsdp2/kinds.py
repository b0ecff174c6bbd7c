"""Kinds of parameters: those whose tensors torch's kernels for lists of tensors take together."""

from collections import defaultdict
from collections.abc import Hashable, Iterable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mmzero.errors import ConfigError


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


def separate_kinds(optimizer: Optimizer) -> None:
    """Turn off ``foreach`` in groups that mix kinds, on which torch's foreach kernels fail.

    Args:
        optimizer (Optimizer): The optimizer; its groups are changed.

    Raises:
        ConfigError: If such a group asks for ``fused`` kernels, which fail likewise.
    """
    for group in optimizer.param_groups:
        kinds = by_kind(param for param in group['params'] if param.requires_grad)
        if len(kinds) < 2 or 'foreach' not in group:
            continue
        group['foreach'] = False
        if group.get('fused'):
            raise ConfigError(
                [
                    'optim_wrapper.optimizer.fused: a group mixes parameters that are sharded with such as are not, or '
                    'are sharded in another way (0-dim parameters, overrides with shard or shard_dim); leave fused out'
                ]
            )
