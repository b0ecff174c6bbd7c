"""The only place for version checks and private imports, each with the condition that removes it."""

import functools
import importlib
import inspect
import operator
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import mmengine.runner.checkpoint
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Store, distributed_c10d
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nn.parallel import DistributedDataParallel

# The modes have no public home; remove once they do.
from torch.overrides import TorchFunctionMode as TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

T = TypeVar('T')


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build modules whose parameters go to the meta device as they are registered; buffers stay real.

    ``torch.device('meta')`` would take everything, and models that read values while they are built (Swin calls
    ``.item()`` on a linspace) fail under it. Remove once torch offers this for parameters alone.

    Yields:
        None: Modules built inside have no parameter storage.
    """
    register = nn.Module.register_parameter
    # One parameter may be registered in several places; kept weakly, so that what is real is freed.
    made = WeakIdKeyDictionary()

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta:
            if param not in made:
                meta = nn.Parameter(param.detach().to('meta'), requires_grad=param.requires_grad)
                meta.__dict__.update(vars(param))
                made[param] = meta
            self._parameters[name] = made[param]

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def build_with_meta_parameters(build: Callable[[], T]) -> T:
    """Build a model with its parameters on meta, or for real where it uses their values while it is built.

    Args:
        build (Callable[[], T]): Builds the model; may be called twice.

    Returns:
        T: The model.
    """
    try:
        with parameters_on_meta():
            built = build()
        if not _has_meta_attributes(built):
            return built
    except (NotImplementedError, RuntimeError) as error:
        if 'meta' not in str(error):
            raise
    return build()


def _has_meta_attributes(model: Any) -> bool:
    """Whether a tensor that is no parameter or buffer was computed from a parameter, so that nothing would fill it."""
    attributes = [value for module in model.modules() for value in vars(module).values()]
    held = [item for value in attributes if isinstance(value, (list, tuple)) for item in value]
    return any(isinstance(value, torch.Tensor) and value.is_meta for value in attributes + held)


@contextmanager
def alone_in_checkpoint_io() -> Iterator[None]:
    """Let one rank read a checkpoint by itself.

    MMEngine's loaders of URLs wait for all ranks at a barrier, since there every rank reads. Remove once
    MMEngine has a loader without it.

    Yields:
        None: Inside, MMEngine's checkpoint loaders take this process for the only one.
    """
    module = mmengine.runner.checkpoint
    get_dist_info = module.get_dist_info
    module.get_dist_info = lambda group=None: (0, 1)
    try:
        yield
    finally:
        module.get_dist_info = get_dist_info


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


local_tensor: Callable[[Any], torch.Tensor] = operator.attrgetter('_local_tensor')
"""The tensor that a shard (DTensor) is on this rank, the same object each time.

``DTensor.to_local`` makes a new view of a parameter in every call. Remove once it does not.
"""


def dtensor_as_it_is(local: torch.Tensor, like: Any) -> Any:
    """Make a shard of a tensor that stays where it is, and the tensor that it is.

    ``DTensor.from_local`` moves it to the device of the mesh. Remove once it can be told not to.

    Args:
        local (Tensor): What this rank holds.
        like (DTensor): A shard of the same whole shape, mesh and placements; the dtype may be another.

    Returns:
        DTensor: The shard.
    """
    meta = TensorMeta(like.shape, like.stride(), local.dtype)
    return DTensor(local, DTensorSpec(like.device_mesh, like.placements, meta), requires_grad=False)


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


@functools.cache
def dcp_pickle_globals() -> dict[tuple[str, str], Any]:
    """What the ``.metadata`` of a DCP checkpoint may name: records of names, shapes, dtypes and places in files.

    Remove once torch reads it without unpickling.

    Returns:
        dict[tuple[str, str], Any]: Module and name to the class or function.
    """
    metadata, storage = 'torch.distributed.checkpoint.metadata', 'torch.distributed.checkpoint.filesystem'
    names = dict.fromkeys(
        (
            'BytesStorageMetadata',
            'ChunkStorageMetadata',
            'Metadata',
            'MetadataIndex',
            'StorageMeta',
            'TensorProperties',
            'TensorStorageMetadata',
            '_MEM_FORMAT_ENCODING',
        ),
        metadata,
    )
    names |= dict(_StorageInfo=storage, Size='torch', PosixPath='pathlib', WindowsPath='pathlib')
    names |= dict(get_layout='torch.serialization', _get_layout='torch.serialization')
    found = {}
    for name, module in names.items():
        value = getattr(importlib.import_module(module), name, None)
        if value is not None:
            found[module, name] = value
    dtypes = [name for name, value in vars(torch).items() if isinstance(value, torch.dtype)]
    return found | {('torch', name): getattr(torch, name) for name in dtypes}


def numpy_pickle_globals() -> tuple:
    """Functions and dtype classes by which numpy arrays and numbers are unpickled.

    They moved from ``numpy.core`` to ``numpy._core`` in numpy 2, and files name either. Remove once checkpoints
    of MMEngine hold no numpy objects.

    Returns:
        tuple: Entries for ``torch.serialization.safe_globals``.
    """
    multiarray = importlib.import_module(f'{"numpy._core" if hasattr(np, "_core") else "numpy.core"}.multiarray')
    found: list = []
    for name in ('_reconstruct', 'scalar'):
        for package in ('numpy._core', 'numpy.core'):
            found.append((getattr(multiarray, name), f'{package}.multiarray.{name}'))
    kinds = ('Float64', 'Float32', 'Int64', 'Int32', 'Bool')
    found += [getattr(np.dtypes, f'{kind}DType') for kind in kinds]
    return tuple(found)


def ddp_buffer_arguments(sync: bool) -> dict[str, Any]:
    """Name DDP's switch for broadcasting buffers before each forward.

    torch 2.13 renames ``broadcast_buffers`` to ``forward_sync_buffers`` and warns of the old name. Remove once the
    floor is torch 2.13.

    Args:
        sync (bool): Whether to broadcast them.

    Returns:
        dict[str, Any]: A keyword argument of DistributedDataParallel.
    """
    known = inspect.signature(DistributedDataParallel).parameters
    return {'forward_sync_buffers' if 'forward_sync_buffers' in known else 'broadcast_buffers': sync}


@contextmanager
def pretended_process_group(world_size: int) -> Iterator[None]:
    """A process group of this rank and others that are not there, in which collectives do nothing.

    What is built in it asks for the number of ranks, as in the run. Does nothing where a process group exists. Remove
    once torch's fake process group is public.

    Args:
        world_size (int): Number of ranks.

    Yields:
        None: Inside, ``torch.distributed`` is initialized.
    """
    if dist.is_initialized():
        yield
        return
    dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def broadcast_coalesced(tensors: list[torch.Tensor]) -> None:
    """Give every rank the tensors of rank 0, in place, in buckets as DDP's. Collective.

    Remove once torch has a public function that broadcasts several tensors at once.

    Args:
        tensors (list[torch.Tensor]): The same shapes and dtypes, in the same order, on every rank.
    """
    dist._broadcast_coalesced(distributed_c10d._get_default_group(), tensors, 250 * 2**20, 0)


def use_expandable_segments() -> None:
    """Let CUDA's allocator grow its segments, as ``PYTORCH_ALLOC_CONF=expandable_segments:True`` does from outside.

    What was allocated before stays where it is. Remove once torch has a public function for it.
    """
    torch._C._accelerator_setAllocatorSettings('expandable_segments:True')


def profiled_events(profile: Any) -> list[Any]:
    """The outermost events of a profile, each with its children, allocations among them.

    ``torch.profiler`` has no public way to the single allocations; ``export_memory_timeline`` gives sums only.

    Args:
        profile (torch.profiler.profile): Ended.

    Returns:
        list: Events with ``tag``, ``name``, ``start_time_ns``, ``children`` and, for allocations, ``extra_fields``.
    """
    return profile.profiler.kineto_results.experimental_event_tree()


def size_of_group(group: Any) -> int:
    """Number of ranks of a process group, as an operator was given it.

    Args:
        group (Any): A boxed ProcessGroup (``c10d`` operators), a ProcessGroup, or its name (functional ones). Remove
            once torch resolves groups in public.

    Returns:
        int: The number.
    """
    if isinstance(group, str):
        return _resolve_process_group(group).size()  # type: ignore[arg-type]
    return (group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)).size()


def default_store() -> Store:
    """Get the key-value store of the default process group. Remove once torch has a public function for it.

    Returns:
        Store: The store that all ranks share.
    """
    return distributed_c10d._get_default_store()


def group_timeout() -> timedelta:
    """How long collectives of the default process group wait. Remove once torch says it in public.

    Returns:
        timedelta: The timeout that the group was made with; torch's default where the backend does not tell.
    """
    try:
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device('cpu'))
        return backend.options._timeout
    except (AttributeError, RuntimeError):
        return dist.distributed_c10d.default_pg_timeout


def use_count(tensor: torch.Tensor) -> int:
    """How many references to a tensor torch's own code and Python hold together. Remove once it is public.

    Args:
        tensor (Tensor): The tensor.

    Returns:
        int: The number.
    """
    return tensor._use_count()  # type: ignore[attr-defined]


def without_autocast_on_cpu() -> AbstractContextManager:
    """Leave autocast's key out of dispatch, for an operator that it calls itself. Remove once torch has it in public.

    ``torch.autocast(enabled=False)`` would also clear its cache of cast weights.

    Returns:
        AbstractContextManager: The context.
    """
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def saved_tensors_hooks_in_force() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """Get the hooks that autograd packs and unpacks saved tensors with.

    Only the innermost ones are called, so that hooks that do not mean to hide others pass tensors on to these. Remove
    once torch tells them in public.

    Returns:
        tuple: Two functions; what keeps tensors as they are where there are none.
    """
    found = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return (_kept_as_it_is, _given_back) if found is None else found[:2]


def _kept_as_it_is(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    # An output that its own graph holds would never be freed without a backward.
    return (tensor if tensor.is_leaf else tensor.detach()), tensor._version


def _given_back(kept: tuple[torch.Tensor, int]) -> torch.Tensor:
    tensor, version = kept
    check_version(tensor, version)
    return tensor


def check_version(tensor: torch.Tensor, version: int) -> None:
    """Refuse what was overwritten since it was saved for backward, as autograd does where no hooks stand.

    Under hooks autograd does not look, and gradients would be wrong. Remove once it does.

    Args:
        tensor (Tensor): What was saved, or shares its version.
        version (int): Its version then.

    Raises:
        RuntimeError: If the version is another now.
    """
    if tensor._version != version:
        raise RuntimeError(
            f'a tensor that is needed for backward has been modified by an inplace operation: it is at version '
            f'{tensor._version} instead of {version}. An input of a module that is recomputed is needed, too; write '
            'out of place, or leave the module out of activation_checkpointing'
        )


def version_of(tensor: torch.Tensor) -> torch.Tensor:
    """Get a tensor without memory that shares another's version, to look at once that one's memory is gone.

    Args:
        tensor (Tensor): The tensor.

    Returns:
        Tensor: An empty one.
    """
    version = tensor.detach()
    # Assigning data leaves the counter.
    version.data = version.new_empty(0)
    return version


def watch_compiles(start: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """Call something before and after each compilation, with ``callback_trigger`` and ``compile_id``.

    ``torch._dynamo.reset`` forgets it. Remove once torch has a public function for it.

    Args:
        start (Callable[[Any], None]): Called before; once, however often it is given.
        end (Callable[[Any], None]): Called after, also where the compilation failed.
    """
    from torch._dynamo.callback import callback_handler

    if start not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(start)
        callback_handler.register_end_callback(end)


def graph_breaks() -> tuple[list[tuple[list[traceback.FrameSummary], str]], list[str]]:
    """What has broken graphs in this process so far, and where.

    ``torch._dynamo.explain`` needs inputs. Remove once torch tells it in public.

    Returns:
        tuple: Stacks, the innermost frame last, and reasons; and the reasons of all, also of those without a stack, as
        where Dynamo left out a function.
    """
    from torch._dynamo.utils import counters, graph_break_reasons

    return [(list(each.user_stack), each.reason) for each in graph_break_reasons], [*counters['graph_break']]


def compiler_errors() -> tuple[type[Exception], ...]:
    """What torch.compile raises of itself. Remove once these have a public home.

    Returns:
        tuple[type[Exception], ...]: Classes.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def is_of_compiled_backward(error: Exception) -> bool:
    """Whether an error says that a compiled backward cannot be differentiated, or cannot run twice.

    Both are plain RuntimeErrors of AOTAutograd. Remove once they have classes.

    Args:
        error (Exception): The error.

    Returns:
        bool: Whether it does.
    """
    text = str(error)
    return 'does not currently support double backward' in text or 'non-empty donated buffers' in text


def in_one_graph() -> AbstractContextManager:
    """Let what is compiled inside fail where a graph breaks.

    ``fullgraph=True`` would also put values that depend on data into the graph. Remove once it is public.

    Returns:
        AbstractContextManager: In which a compiled function is called.
    """
    import torch._dynamo

    return torch._dynamo.error_on_graph_break(True)
