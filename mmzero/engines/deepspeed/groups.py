"""The optimizer that schedulers and hooks see, beside the one that DeepSpeed steps.

[Note: groups that DeepSpeed leaves out]
DeepSpeed removes groups without a trained parameter, as paramwise_cfg makes them of frozen layers, and fails on those
that it does not remove. The numbers of the others shift, and with them what checkpoints of other engines, schedulers
and logs say of groups. So DeepSpeed gets the user's optimizer, and what MMEngine holds is one with all groups: the very
dicts of those that DeepSpeed steps, so that what a scheduler writes is what it reads.
"""

from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.optim import Optimizer


class AllGroups(Optimizer):
    """Every group of an optimizer, in its order, for as long as DeepSpeed has some of them.

    Args:
        inner (Optimizer): The user's, which DeepSpeed will step; its groups keep their trained parameters only.
    """

    def __init__(self, inner: Optimizer) -> None:
        params = [list(group['params']) for group in inner.param_groups]
        for group in inner.param_groups:
            group['params'] = [param for param in group['params'] if param.requires_grad]
        super().__init__(list(inner.param_groups), inner.defaults)
        self.inner = inner
        self.params: list[list[nn.Parameter]] = params
        """The model's parameters by group, frozen ones too; ``group['params']`` is DeepSpeed's."""

    def as_of_model(self) -> Any:
        """Something with ``param_groups``, copies of the groups that have the model's parameters."""
        groups = [dict(group, params=params) for group, params in zip(self.param_groups, self.params, strict=True)]
        return SimpleNamespace(param_groups=groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: DeepSpeed's step empties its gradients, whose buffers on the host it goes on to use.

        Args:
            set_to_none (bool): As torch's.
        """

    def step(self, closure: Any = None) -> Any:
        """DeepSpeed steps.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError('DeepSpeed steps this optimizer; call the step of the ZeroOptimWrapper')
