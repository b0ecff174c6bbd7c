"""Flat tensors of an optimizer whose state lies on a disk between steps (ZeRO-Infinity, arXiv:2104.07857).

[Note: mapped files]
At stage 3 DeepSpeed keeps a file for each flat tensor that is large enough: of master weights, and of each entry of
their state. Its step reads the files of one group at a time into buffers, and writes them back; in between the tensors
are empty. What is read or written here is mapped from the files, so that no more comes into memory than is touched. A
mapping lives for as long as its tensor does, and DeepSpeed, which reads without the page cache, first has the kernel
write back what a mapping has changed.

[Note: gradients do not go to the disk]
DeepSpeed would write those of a megabyte and more, and read each to where it belongs in a buffer. Its operator reads
nothing to an address that is not a multiple of 512 bytes, and says that it did: from the first parameter of another
size on, a group steps with whatever the buffer held (DeepSpeed 0.19.8). They are accumulated in a buffer that is there
all the time anyway, so here they are taken from there, whole: of what had none there are zeros.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mmzero.errors import CheckpointError


class SwappedGroups:
    """The groups of a ZeRO optimizer whose masters and state lie in files.

    Args:
        zero: DeepSpeed's ZeRO optimizer.
    """

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        self._swapper: Any = getattr(zero, 'optimizer_swapper', None)
        if self._swapper is not None:
            self._swapper.swap_out_gradients = lambda **_: None

    def __contains__(self, group: int) -> bool:
        """Whether a group's are on the disk, which small ones are not."""
        return self._swapper is not None and self._zero._swappable_optimizer_subgroup(group)

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """Have gradients of each group for the step inside; see [Note: gradients do not go to the disk]."""
        groups = [] if self._swapper is None else [g for g in range(len(self._zero.fp16_groups)) if g in self]
        for group in groups:
            self._info(group).unswapped_gradients = dict(self._accumulated(group))
        try:
            yield
        finally:
            for group in groups:
                self._info(group).release_unswapped_gradients()

    def _accumulated(self, group: int) -> Iterator[tuple[int, Tensor]]:
        """Gradients of a group by their offsets: zeros of what has none."""
        # It has partitions of all groups in their order.
        first = sum(self._zero.fp16_partitioned_groups_flat_numel[:group])
        for param in self._zero.fp16_groups[group]:
            _, offset, size = self._zero.grad_position[self._zero.get_param_id(param)]
            yield offset, self._zero.grad_partitions_flat_buffer.narrow(0, first + offset, size)

    def _key(self, group: int) -> Tensor:
        return self._zero.fp32_partitioned_groups_flat[group]

    def _info(self, group: int) -> Any:
        return self._swapper.swap_params_info[self._swapper.parameter_id(self._key(group))]

    def _mapped(self, group: int, context: Any) -> Tensor:
        info = self._info(group)
        return torch.from_file(context.swap_path, shared=True, size=info.numel(), dtype=info.dtype())

    def flat(self, group: int) -> Tensor:
        """The master weights of a group: mapped, what is written goes into the file."""
        return self._mapped(group, self._info(group).tensors[0])

    def entries(self, group: int) -> dict[str, Any]:
        """The optimizer's state of a group: as the optimizer has it, with what is on the disk mapped."""
        there = {id(context.compute_tensor): context for context in self._info(group).tensors[1:]}
        return {
            name: self._mapped(group, there[id(value)]) if id(value) in there else value
            for name, value in self._zero.optimizer.state.get(self._key(group), {}).items()
        }

    def make(self, group: int, plain: Mapping[str, Any], names: Sequence[str]) -> None:
        """Give a group state of zeros.

        Args:
            group (int): Its number.
            plain (Mapping[str, Any]): Entries that are no tensors of the group's shape, such as counters.
            names (Sequence[str]): Those that are.

        Raises:
            CheckpointError: If there are more than DeepSpeed has buffers for.
        """
        needed, count = 2 + len(names), self._swapper.swap_buffer_manager.count
        if needed > count:
            raise CheckpointError(
                f"the checkpoint's optimizer has {len(names)} entries for each parameter ({', '.join(names)}), which "
                f'take {needed} buffers, and this run has {count}; set offload_optimizer=dict(buffer_count={needed}) '
                'in model_wrapper_cfg.engine_options.zero_optimization, or the options of the optimizer as they were'
            )
        state, info = self._zero.optimizer.state.setdefault(self._key(group), {}), self._info(group)
        if {name for name, value in self.entries(group).items() if _is_flat(value, info)} != set(names):
            state.clear()
            # As DeepSpeed's purge_state: another step, or the lines below, make the files anew.
            info.tensors, info.has_state_tensors = info.tensors[:1], False
        state.update(plain)
        if info.has_state_tensors:
            for value in self.entries(group).values():
                if _is_flat(value, info):
                    value.zero_()
        elif names:
            self._zero._optimizer_states_and_gradient_swap_in(group)
            state.update({name: torch.zeros(info.numel(), dtype=info.dtype()) for name in names})
            # And waits for it.
            self._swapper.swap_out_optimizer_state(parameter=self._key(group), async_swap=False)
            self._key(group).grad = None

    @contextmanager
    def in_memory(self, group: int) -> Iterator[None]:
        """Have a group's masters and state where DeepSpeed looks for them, to be read.

        Args:
            group (int): Its number; one that is not on the disk is there already.
        """
        if group not in self:
            yield
            return
        self._zero._optimizer_states_and_gradient_swap_in(group)
        try:
            yield
        finally:
            self._zero._release_swap_buffers(group)


def _is_flat(value: Any, info: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == info.numel() and value.dim() == 1


def swap_in_once(model: nn.Module) -> None:
    """Have no parameter read from the disk twice at once.

    DeepSpeed reads ahead along the uses of parameters, and where there are buffers enough to get from a forward's use
    of one to its backward's, it asks for both, and dies of an assertion (0.19.8).

    Args:
        model (nn.Module): The model, whose parameters DeepSpeed has on a disk.
    """
    first: Any = next(model.parameters())
    swapper = first.nvme_swapper
    swap_in = swapper.swap_in

    def once(params: list[nn.Parameter], *args: Any, **kwargs: Any) -> None:
        swap_in(list(dict.fromkeys(params)), *args, **kwargs)

    swapper.swap_in = once


def buffers_needed(optimizer: torch.optim.Optimizer) -> int:
    """Count the buffers that DeepSpeed takes for the group that it steps.

    Args:
        optimizer (torch.optim.Optimizer): The user's.

    Returns:
        int: One for the masters, one for gradients, and one for each entry of the state of their shape, found by a
        step of one small parameter with the options of each group.
    """
    return 2 + max(_state_tensors(optimizer, group) for group in optimizer.param_groups)


def _state_tensors(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> int:
    probe = torch.nn.Parameter(torch.zeros(2))
    probe.grad = torch.ones(2)
    options = {name: value for name, value in group.items() if name in optimizer.defaults}
    cls: Any = type(optimizer)
    tried = cls([dict(options, params=[probe])])
    tried.step()
    return sum(isinstance(value, Tensor) and value.shape == probe.shape for value in tried.state[probe].values())
