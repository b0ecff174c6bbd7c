"""FSDP2's own steps, and what it does not say in public."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.utils.weak import WeakIdKeyDictionary

HAS_REDUCE_SCATTER_UNUSED_PARAMS = hasattr(FSDPModule, 'set_reduce_scatter_unused_params')


def set_reduce_scatter_unused_params(root: FSDPModule) -> None:
    """Let ranks that did not use a parameter reduce zeros for it.

    torch 2.13 has ``FSDPModule.set_reduce_scatter_unused_params``; before, gradients of zeros are put in place right
    before a unit reduces. Remove the second way once the floor is torch 2.13.

    Args:
        root (FSDPModule): The sharded model.
    """
    if HAS_REDUCE_SCATTER_UNUSED_PARAMS:
        root.set_reduce_scatter_unused_params(True)
        return
    _before_reducing(root, _put_zeros)


def reduce_in_one_dtype(root: FSDPModule, zeros: bool) -> None:
    """Let a unit of 16 bit reduce what was accumulated over micro-batches with what the last one alone has used.

    FSDP2 keeps the former in the dtype of the reduction and the latter in 16 bit, and refuses the mixture ("expects
    uniform gradient dtype"). Remove once it does not.

    Args:
        root (FSDPModule): The sharded model.
        zeros (bool): Whether ranks that did not use a parameter reduce zeros for it.
    """
    _before_reducing(root, functools.partial(_all_accumulated, zeros))


def _before_reducing(root: FSDPModule, prepare: Callable[[list[Any]], None]) -> None:
    """Call something with the trained parameters of a unit before it reduces their gradients."""

    def prepare_group(group: Any) -> None:
        if group.reduce_grads:
            gathered = [param for param in group.fsdp_params if hasattr(param, '_unsharded_param')]
            prepare([param for param in gathered if param._unsharded_param.requires_grad])

    for module in root.modules():  # type: ignore[attr-defined]
        if isinstance(module, FSDPModule):
            for group in _param_groups(module):
                _call_before(group, 'post_backward', functools.partial(prepare_group, group))


def _call_before(group: Any, method: str, call: Callable[[], None]) -> None:
    """Call something before a method of a group, each time."""
    original = getattr(group, method)

    def run(*args: Any) -> Any:
        call()
        return original(*args)

    setattr(group, method, run)


def _put_zeros(params: list[Any]) -> None:
    for param in params:
        if param._unsharded_param.grad is None and param.unsharded_accumulated_grad is None:
            param._unsharded_param.grad = torch.zeros_like(param._unsharded_param)


def _all_accumulated(zeros: bool, params: list[Any]) -> None:
    if all(param.unsharded_accumulated_grad is None for param in params):
        return
    if zeros:
        _put_zeros(params)
    for param in params:
        if param.unsharded_accumulated_grad is None:
            param.to_accumulated_grad_if_needed()


def reduce_root_last(root: FSDPModule) -> None:
    """Let units that autograd has not reduced do so before the root, at the end of backward.

    FSDP2 goes through them in the order of modules, the root first. The first unit of a model whose inputs have a
    gradient on some ranks alone, by their data, would reduce before the root there and after it elsewhere. Remove once
    the order does not depend on that.

    Args:
        root (FSDPModule): The sharded model.
    """
    states: list[Any] = [
        module._get_fsdp_state()
        for module in root.modules()  # type: ignore[attr-defined]
        if isinstance(module, FSDPModule)
    ]
    groups = [group for state in reversed(states[1:]) for group in reversed(_groups_of(state))]

    def reduce_the_rest() -> None:
        for group in groups:
            if group._training_state is not TrainingState.POST_BACKWARD:
                group.post_backward()

    for state in states:
        # Whichever is the first in backward has it called.
        _call_before(state, '_root_post_backward_final_callback', reduce_the_rest)


def _param_groups(module: Any) -> list[Any]:
    """FSDP2's own groups of parameters of a unit; torch 2.13 allows several."""
    return _groups_of(module._get_fsdp_state())


def _groups_of(state: Any) -> list[Any]:
    groups = getattr(state, '_fsdp_param_groups', None)
    return [group for group in [state._fsdp_param_group] if group is not None] if groups is None else groups


# FSDP2's own names for what a unit communicates in.
_PHASES = dict(pre_forward='forward', pre_backward='backward', post_backward='reduction')


def before_phases(module: FSDPModule, call: Callable[[str], None]) -> None:
    """Call something before a unit gathers or reduces.

    Hooks of modules do not see all of backward, and those on tensors cost more. Remove once FSDP2 has hooks of its own.

    Args:
        module (FSDPModule): The unit.
        call (Callable[[str], None]): Is given 'forward', 'backward' or 'reduction'.
    """

    def come_to(group: Any, phase: str) -> None:
        # Each output of a unit calls for its parameters, the first alone gathers them; how many outputs have a
        # gradient may depend on the data.
        if phase != 'backward' or group._training_state is not TrainingState.PRE_BACKWARD:
            call(phase)

    for group in _param_groups(module):
        for name, phase in _PHASES.items():
            _call_before(group, name, functools.partial(come_to, group, phase))


def keep_requires_grad(root: FSDPModule) -> None:
    """Let ``requires_grad_`` hold whether a parameter is gathered or not when it is called.

    FSDP2 hands it from shards to gathered parameters alone, and a model that freezes a network while that is gathered
    would find it as before after the next gathering. Remove once FSDP2 hands it back, too.

    Args:
        root (FSDPModule): The sharded model.
    """

    def hand_back(group: Any) -> None:
        for param in group.fsdp_params:
            info = param._module_info
            current = getattr(info.module, info.param_name)
            if current.requires_grad != param.sharded_param.requires_grad:
                param.sharded_param.requires_grad_(current.requires_grad)

    for module in root.modules():  # type: ignore[attr-defined]
        if isinstance(module, FSDPModule):
            for group in _param_groups(module):
                for method in ('_to_sharded', '_to_sharded_post_forward', '_to_unsharded'):
                    _call_before(group, method, functools.partial(hand_back, group))


class DoubleBackward:
    """Keeps units gathered from a backward with ``create_graph=True`` to the step, for penalties on gradients.

    What such a backward computes needs the parameters once more, in a backward of its own, and may give them gradients
    when FSDP2 has reduced those of the unit already. FSDP2 alone frees them, and autograd reads what was freed (seen: a
    segmentation fault, or wrong values). Remove once FSDP2 keeps them.

    Args:
        root (FSDPModule): The sharded model.
    """

    def __init__(self, root: FSDPModule) -> None:
        self._kept: dict[int, Any] = {}
        modules = [module for module in root.modules() if isinstance(module, FSDPModule)]  # type: ignore[attr-defined]
        for group in (group for module in modules for group in _param_groups(module)):
            for method in ('pre_backward', 'post_backward'):
                _call_before(group, method, functools.partial(self._note, group))
            group.reshard = functools.partial(self._reshard, group, group.reshard)

    def _note(self, group: Any) -> None:
        # Autograd's engine enables gradients within a backward that makes a graph.
        if torch.is_grad_enabled() and group._training_state is not TrainingState.FORWARD:
            self._kept[id(group)] = group

    def _reshard(self, group: Any, reshard: Callable[[], None]) -> None:
        if id(group) not in self._kept:
            reshard()

    def reduce_the_rest(self) -> None:
        """Reduce the gradients that came after their unit had reduced. Collective."""
        for group in self._kept.values():
            gathered = [param for param in group.fsdp_params if hasattr(param, '_unsharded_param')]
            zeros = getattr(group, 'reduce_scatter_unused_params', False)
            if zeros or any(param._unsharded_param.grad is not None for param in gathered):
                group.post_backward()
                group._training_state = TrainingState.IDLE
                group.finalize_backward()

    def release(self) -> bool:
        """Let units be freed again.

        Returns:
            bool: Whether some were kept.
        """
        has_kept = bool(self._kept)
        self._kept.clear()
        return has_kept


def drop_gathered_ahead(module: FSDPModule) -> None:
    """Drop what was gathered ahead for a unit that has not run since.

    FSDP2 itself does so at the end of a backward alone. Remove once it has a public function for it.

    Args:
        module (FSDPModule): The unit.
    """
    for group in _param_groups(module):
        result, group._all_gather_result = group._all_gather_result, None
        if result is None:
            continue
        if result.all_gather_event is not None:
            group.device_handle.current_stream().wait_event(result.all_gather_event)
        if isinstance(result.all_gather_work, dist.Work):
            result.all_gather_work.wait()


@contextmanager
def kept_gathered(module: FSDPModule) -> Iterator[None]:
    """Keep a unit gathered over forwards of it.

    ``FSDPModule.set_reshard_after_forward`` would forget a number of ranks. Remove once it takes one.

    Args:
        module (FSDPModule): The unit.

    Yields:
        None: Inside, a forward of the unit leaves it gathered.
    """
    before = [(group, group.post_forward_mesh_info) for group in _param_groups(module)]
    for group, _ in before:
        group.post_forward_mesh_info = None
    try:
        yield
    finally:
        for group, mesh_info in before:
            group.post_forward_mesh_info = mesh_info


_post_forward_meshes: Any = WeakIdKeyDictionary()


@contextmanager
def shared_post_forward_meshes() -> Iterator[None]:
    """Let units that are resharded to part of the ranks share their process groups.

    ``fully_shard`` makes a mesh, and with it new process groups, for every unit. Remove once it keeps them.

    Yields:
        None: Inside, ``fully_shard`` behaves so.
    """
    make = _fully_shard._get_post_forward_mesh_info

    def get(reshard_after_forward: bool | int, mesh_info: Any) -> Any:
        if isinstance(reshard_after_forward, bool):
            return make(reshard_after_forward, mesh_info)
        made = _post_forward_meshes.setdefault(mesh_info.mesh, {})
        if reshard_after_forward not in made:
            made[reshard_after_forward] = make(reshard_after_forward, mesh_info)
        return made[reshard_after_forward]

    _fully_shard._get_post_forward_mesh_info = get
    try:
        yield
    finally:
        _fully_shard._get_post_forward_mesh_info = make
