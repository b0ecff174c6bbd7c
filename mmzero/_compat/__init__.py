"""The only place for version checks and private imports, each with the condition that removes it."""

# The modes have no public home; remove once they do.
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mmzero._compat.autograd import (
    check_version,
    saved_tensors_hooks_in_force,
    use_count,
    version_of,
    without_autocast_on_cpu,
)
from mmzero._compat.building import build_with_meta_parameters, parameters_on_meta
from mmzero._compat.compiler import compiler_errors, graph_breaks, in_one_graph, is_of_compiled_backward, watch_compiles
from mmzero._compat.dtensors import dtensor_as_it_is, local_tensor
from mmzero._compat.files import alone_in_checkpoint_io, dcp_pickle_globals, mapped_files, numpy_pickle_globals
from mmzero._compat.fsdp2 import (
    HAS_REDUCE_SCATTER_UNUSED_PARAMS,
    DoubleBackward,
    before_phases,
    drop_gathered_ahead,
    keep_requires_grad,
    kept_gathered,
    reduce_in_one_dtype,
    reduce_root_last,
    set_reduce_scatter_unused_params,
    shared_post_forward_meshes,
)
from mmzero._compat.loops import InfiniteIterator
from mmzero._compat.memory import profiled_events, return_freed_memory, use_expandable_segments
from mmzero._compat.processes import (
    broadcast_coalesced,
    ddp_buffer_arguments,
    default_store,
    group_timeout,
    launch_of_torchrun,
    pretended_process_group,
    size_of_group,
)

__all__ = [
    'DoubleBackward',
    'HAS_REDUCE_SCATTER_UNUSED_PARAMS',
    'InfiniteIterator',
    'TorchDispatchMode',
    'TorchFunctionMode',
    'alone_in_checkpoint_io',
    'before_phases',
    'broadcast_coalesced',
    'build_with_meta_parameters',
    'check_version',
    'compiler_errors',
    'dcp_pickle_globals',
    'ddp_buffer_arguments',
    'default_store',
    'drop_gathered_ahead',
    'dtensor_as_it_is',
    'graph_breaks',
    'group_timeout',
    'in_one_graph',
    'is_of_compiled_backward',
    'keep_requires_grad',
    'kept_gathered',
    'launch_of_torchrun',
    'local_tensor',
    'mapped_files',
    'numpy_pickle_globals',
    'parameters_on_meta',
    'pretended_process_group',
    'profiled_events',
    'reduce_in_one_dtype',
    'reduce_root_last',
    'return_freed_memory',
    'saved_tensors_hooks_in_force',
    'set_reduce_scatter_unused_params',
    'shared_post_forward_meshes',
    'size_of_group',
    'use_count',
    'use_expandable_segments',
    'version_of',
    'watch_compiles',
    'without_autocast_on_cpu',
]
