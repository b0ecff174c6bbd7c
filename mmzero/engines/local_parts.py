"""A rank's own part of a model, as a plain module with the model's names: what can be copied, averaged and swapped.

[Note: a mirror of the shards]
A sharded model cannot be deep-copied, and its modules hold gathered parameters or shards by turns. The storage of a
shard stays. So a tree of empty modules with the model's names holds parameters over the same storage: what the
optimizer writes is seen in it at once, and what is written into it the model computes with from its next gathering on.
Element by element it takes any code that was made for whole parameters, without communication.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmzero._compat import dtensor_as_it_is, local_tensor
from mmzero.engines.state import gather_tensors, scatter_tensors


class LocalParts:
    """Mirrors a sharded model.

    Args:
        model (nn.Module): The sharded model, no unit of which is gathered.
    """

    def __init__(self, model: nn.Module) -> None:
        self._params = {name: param.detach() for name, param in model.named_parameters(remove_duplicate=False)}
        self.module = self._mirrored(model, {}, {})

    def part_of(self, param: nn.Parameter) -> Tensor:
        """What this rank holds of a parameter, of the same memory.

        Args:
            param (nn.Parameter): The model's.

        Returns:
            Tensor: A plain tensor.
        """
        return local_tensor(param) if isinstance(param, DTensor) else param.detach()

    def gather(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gather tensors laid out as the mirror's, one at a time. Collective.

        Args:
            state (dict[str, Tensor]): This rank's parts by the names of the mirror's state dict.

        Returns:
            dict[str, Tensor]: Whole CPU tensors on rank 0; empty on other ranks.
        """
        return gather_tensors(self.sharded(state))

    def scatter(self, state: dict[str, Tensor], whole: dict[str, Tensor]) -> None:
        """Fill those tensors laid out as the mirror's that rank 0 has whole. Collective.

        Args:
            state (dict[str, Tensor]): This rank's parts, the same names on every rank; changed in place.
            whole (dict[str, Tensor]): Whole tensors on rank 0; ignored on other ranks.
        """
        scatter_tensors(self.sharded(state), whole)

    def sharded(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Make shards of tensors laid out as the mirror's, of the same memory. No communication.

        Args:
            state (dict[str, Tensor]): This rank's parts by the names of the mirror's state dict.

        Returns:
            dict[str, Tensor]: As :meth:`mmzero.engines.Engine.sharded_state`.
        """
        return {name: self._sharded(name, part) for name, part in state.items()}

    def to_save(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """What this rank writes of tensors laid out as the mirror's, into a checkpoint in parts. Collective.

        Args:
            state (dict[str, Tensor]): This rank's parts by the names of the mirror's state dict.

        Returns:
            dict[str, Tensor]: As :meth:`mmzero.engines.Engine.state_to_save`.
        """
        return self.sharded(state)

    def _sharded(self, name: str, part: Tensor) -> Tensor:
        like: Any = self._params.get(name)
        if not isinstance(like, DTensor):
            return part
        return dtensor_as_it_is(part, like)

    def _mirrored(
        self, module: nn.Module, made: dict[nn.Module, nn.Module], params: dict[Tensor, nn.Parameter]
    ) -> nn.Module:
        """What is shared stays shared, so that it is averaged once."""
        if module in made:
            return made[module]
        mirror = made[module] = nn.Module()
        for name, param in module._parameters.items():
            if param is not None and param not in params:
                params[param] = nn.Parameter(self.part_of(param), requires_grad=False)
            mirror.register_parameter(name, None if param is None else params[param])
        for name, buffer in module._buffers.items():
            mirror.register_buffer(name, buffer, persistent=name not in module._non_persistent_buffers_set)
        for name, child in module._modules.items():
            mirror.add_module(name, None if child is None else self._mirrored(child, made, params))
        return mirror
