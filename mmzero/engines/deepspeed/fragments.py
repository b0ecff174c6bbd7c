"""What of each parameter this rank holds in float32, and reading and writing whole values through it.

[Note: fragments]
Stages 1 and 2 flatten a group's parameters and cut the flat tensor among ranks, wherever that falls; stage 3 cuts each
parameter by itself. In both a rank holds one run of each flattened parameter's elements, in float32, as a piece of a
flat tensor that the optimizer steps; its state has tensors of the same shape. So a fragment says all that is needed to
read a weight, or an entry of the state, and to write it, whichever class of DeepSpeed's made it.

[Note: gradients of an earlier step]
At stage 3, and on the host at every stage, DeepSpeed accumulates gradients in buffers that it overwrites with a
parameter's first gradient of a step, but never empties. So one that a step does not use is stepped by its gradient of
an earlier step, and one that only a later micro-batch uses gets that added (DeepSpeed 0.19.8). Here they are emptied
after each step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmzero.engines.deepspeed.swapped import SwappedGroups
from mmzero.engines.flat_shard import FlatShard


@dataclass(frozen=True)
class Fragment:
    """This rank's run of elements of one parameter.

    Args:
        group (int): Number of the flat tensor.
        offset (int): Where in it the run begins.
        start (int): Where in the flattened parameter.
        numel (int): Elements; 0 where other ranks hold all of them.
        shape (torch.Size): The whole parameter's.
    """

    group: int
    offset: int
    start: int
    numel: int
    shape: torch.Size

    def of(self, flat: Tensor) -> Tensor:
        """The run in a flat tensor.

        Args:
            flat (Tensor): The master weights of the group, or an entry of their state.

        Returns:
            Tensor: A view, flat.
        """
        return flat.detach().narrow(0, self.offset, self.numel)


class Fragments:
    """The fragments of all trained parameters.

    Args:
        zero: DeepSpeed's ZeRO optimizer.
        device (torch.device): Where this rank computes.
    """

    def __init__(self, zero: Any, device: torch.device) -> None:
        self.zero = zero
        self.device = device
        params, flats, _ = _lists(zero)
        self._flats: str = flats
        self.swapped = SwappedGroups(zero)
        self.of = {
            param: _fragment(zero, param, index) for index, group in enumerate(getattr(zero, params)) for param in group
        }

    def flat(self, group: int) -> Tensor:
        """The master weights of a group that this rank holds."""
        return self.swapped.flat(group) if group in self.swapped else self._key(group)

    def _key(self, group: int) -> Tensor:
        return getattr(self.zero, self._flats)[group]

    def own(self, param: nn.Parameter) -> Tensor:
        """This rank's run of a parameter's master weights: a view."""
        fragment = self.of[param]
        return fragment.of(self.flat(fragment.group))

    def entries(self, group: int) -> dict[str, Any]:
        """The optimizer's state of a group."""
        if group in self.swapped:
            return self.swapped.entries(group)
        return self.zero.optimizer.state.get(self._key(group), {})

    def make_entries(self, group: int, plain: Mapping[str, Any], dtypes: Mapping[str, torch.dtype]) -> None:
        """Give a group state of zeros that is filled afterwards.

        Args:
            group (int): The group's number.
            plain (Mapping[str, Any]): Entries that are no tensors of the flat tensor's shape.
            dtypes (Mapping[str, torch.dtype]): Of those that are, by name.

        Raises:
            CheckpointError: If a group on a disk has no buffers for them.
        """
        plain = {name: value.clone() if isinstance(value, Tensor) else value for name, value in plain.items()}
        if group in self.swapped:
            # In the dtype of the files.
            self.swapped.make(group, plain, list(dtypes))
            return
        flat = self._key(group)
        zeros = {name: torch.zeros_like(flat, dtype=dtype, requires_grad=False) for name, dtype in dtypes.items()}
        self.zero.optimizer.state[flat] = plain | zeros

    def shard(self, param: nn.Parameter, part: Tensor) -> FlatShard:
        """Show a run of a parameter as a shard.

        Args:
            param (nn.Parameter): Whose run.
            part (Tensor): This rank's, flat.

        Returns:
            FlatShard: The shard, of the same memory.
        """
        fragment = self.of[param]
        return FlatShard(part, fragment.start, fragment.shape)

    def gather(self, param: nn.Parameter, part: Tensor) -> Tensor | None:
        """Join the runs of all ranks. Collective.

        Args:
            param (nn.Parameter): Whose runs.
            part (Tensor): This rank's, flat.

        Returns:
            Tensor or None: The whole on rank 0's CPU, to the bit; None on other ranks.
        """
        fragment = self.of[param]
        whole = torch.zeros(fragment.shape.numel(), dtype=part.dtype, device=self.device)
        whole.narrow(0, fragment.start, fragment.numel).copy_(part)
        # Of the bytes, so that a zero keeps its sign.
        dist.reduce(whole.view(torch.uint8), dst=0)
        return whole.view(fragment.shape).cpu() if dist.get_rank() == 0 else None

    def cut(self, param: nn.Parameter, whole: Tensor) -> Tensor:
        """This rank's run of a tensor of a parameter's shape that every rank has.

        Args:
            param (nn.Parameter): The parameter.
            whole (Tensor): The tensor.

        Returns:
            Tensor: A view, flat.
        """
        fragment = self.of[param]
        return whole.detach().reshape(-1).narrow(0, fragment.start, fragment.numel)

    def forget_gradients(self) -> None:
        """Empty DeepSpeed's gradients after a step; see [Note: gradients of an earlier step]."""
        buffers = [getattr(self.zero, 'grad_partitions_flat_buffer', None)]
        buffers += getattr(self.zero, 'accumulated_grads_in_cpu', {}).values()
        buffers += [flat.grad for flat in getattr(self.zero, self._flats)]
        for buffer in buffers:
            if buffer is not None:
                buffer.zero_()

    def write_back(self) -> None:
        """Give the model the master weights, which have been changed. Collective."""
        if hasattr(self.zero, 'update_lp_params'):
            self.zero.update_lp_params()
            return
        # As its step does: what a forward has left gathered would keep the values from before.
        self.zero._partition_all_parameters()
        for group in range(len(self.zero.fp16_groups)):
            with self.swapped.in_memory(group):
                self.zero._reassign_or_swap_out_partitioned_parameters(group)
        # The copies within a node, of hpZ; DeepSpeed does this for trained parameters alone.
        for param in self.zero.module.parameters():
            param.ds_secondary_tensor = None
        if self.zero.persistent_parameters:
            self.zero.persistent_parameters[0].all_gather(self.zero.persistent_parameters)


def _lists(zero: Any) -> tuple[str, str, bool]:
    """Names of the lists of a ZeRO optimizer: of parameters by groups and of master weights; whether it is stage 3."""
    found = [names for names in _NAMES if hasattr(zero, names[0])]
    if not found:
        raise RuntimeError(f'{type(zero).__name__} of deepspeed keeps its parameters in a way that is not known here')
    return found[0]


_NAMES = (
    ('bit16_groups', 'single_partition_of_fp32_groups', False),
    ('bf16_groups', 'fp32_groups_flat_partition', False),
    ('fp16_groups', 'fp32_partitioned_groups_flat', True),
)


def _fragment(zero: Any, param: Any, group: int) -> Fragment:
    if _lists(zero)[2]:
        group, offset, size = zero.grad_position[zero.get_param_id(param)]
        start = size * dist.get_rank(param.ds_process_group)
        numel = min(max(param.ds_numel - start, 0), size)
        return Fragment(group, offset, min(start, param.ds_numel), numel, torch.Size(param.ds_shape))
    mapping = param._hp_mapping
    if mapping is None:
        return Fragment(group, 0, 0, 0, param.shape)
    there, here = mapping.hp_fragment_address, mapping.lp_fragment_address
    return Fragment(group, there.start, here.start, here.numel, param.shape)
