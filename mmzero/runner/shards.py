"""What a sharded checkpoint has of a run's optimizers."""

from typing import Any

from torch import Tensor

from mmzero.checkpoint import optimizer_prefix
from mmzero.wrappers.several import each


def optimizer_parts(optim_wrapper: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Take the state of one optimizer, or of several, apart. Collective.

    Args:
        optim_wrapper (OptimWrapper): The optimizer wrapper, or an OptimWrapperDict.

    Returns:
        tuple[dict[str, Tensor], dict]: Shards by name, and what is saved as ``optimizer``.
    """
    shards: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for path, wrapper in each(optim_wrapper).items():
        own, others = wrapper.shards()
        _, _, name = path.partition('.')
        shards |= {f'{optimizer_prefix(name)}{key}': tensor for key, tensor in own.items()}
        rest |= {name: others} if name else others
    return shards, rest
