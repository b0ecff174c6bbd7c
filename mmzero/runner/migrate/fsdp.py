"""Arguments of MMFullyShardedDataParallel, which are those of torch's FullyShardedDataParallel and more."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from mmzero.config.reader import DTYPES
from mmzero.errors import near_names
from mmzero.runner.migrate.draft import Answer, Draft, answer_all, lost, needless
from mmzero.runner.migrate.values import dtype_name, policy_value
from mmzero.runner.translate import type_name

OWNER = 'MMFullyShardedDataParallel'

STRATEGIES = {
    'FULL_SHARD': (3, 'parameters, gradients and optimizer state are sharded'),
    'SHARD_GRAD_OP': (2, 'gradients and optimizer state are sharded, parameters stay gathered after forward'),
    'NO_SHARD': (0, 'nothing is sharded, which is DDP'),
    'HYBRID_SHARD': (3, 'sharded within a node, replicated over nodes'),
    '_HYBRID_SHARD_ZERO2': (2, 'sharded within a node, replicated over nodes; parameters stay gathered after forward'),
}
"""torch's ShardingStrategy to the stage, and what it is."""


def migrate_fsdp(draft: Draft, path: str, wrapper: Mapping[str, Any]) -> None:
    """Answer the arguments of MMFullyShardedDataParallel.

    Args:
        draft (Draft): Takes the outcome.
        path (str): Their config path.
        wrapper (Mapping[str, Any]): The arguments, and ``type``.
    """
    given = {name: value for name, value in wrapper.items() if name not in ('type', '_scope_')}
    if given.get('sharding_strategy') is None:
        stage, what = STRATEGIES['FULL_SHARD']
        draft.becomes(f'{path}.sharding_strategy', None, {'model_wrapper_cfg.stage': stage}, f'by default {what}')
    if given.get('auto_wrap_policy') is None:
        why = (
            'without one the whole model was one unit, gathered at once; AutoPolicy finds the repeated blocks. '
            'wrap_policy=None is the old way'
        )
        draft.differs(f'{path}.auto_wrap_policy', None, why)
    answer_all(draft, path, given, FSDP_ANSWERS, OWNER)
    _tell_of_steps(draft)


def _sharding_strategy(draft: Draft, path: str, value: Any) -> None:
    name = str(getattr(value, 'name', value)).rsplit('.', 1)[-1]
    if name not in STRATEGIES:
        draft.faults.add(path, f'got {value!r}, which is no ShardingStrategy{near_names(name, STRATEGIES)}')
        return
    stage, what = STRATEGIES[name]
    targets: dict[str, Any] = {'model_wrapper_cfg.stage': stage}
    if 'HYBRID' in name:
        if draft.ranks_per_node is None:
            draft.faults.add(path, f'got {name!r}, which shards within a node; say --ranks-per-node')
            return
        targets['model_wrapper_cfg.mesh'] = dict(replicate=-1, shard=draft.ranks_per_node)
    draft.becomes(path, value, targets, what)


def _cpu_offload(draft: Draft, path: str, value: Any) -> None:
    asked = value if isinstance(value, bool) else getattr(value, 'offload_params', None)
    if isinstance(value, Mapping):
        asked = value.get('offload_params')
    if not isinstance(asked, bool):
        draft.faults.add(path, f'got {value!r}; {OWNER} takes True, False or a CPUOffload')
    elif not asked:
        draft.needless(path, value, 'nothing is offloaded by default')
    elif draft.stage == 0:
        draft.lost(path, value, 'at stage 0 every rank keeps all where it computes; use stage 1, 2 or 3 with offload')
    else:
        why = 'shards, their gradients and the optimizer state go together, as they did'
        draft.becomes(path, value, {'model_wrapper_cfg.offload': dict(params='cpu', optimizer='cpu')}, why)


def _auto_wrap_policy(draft: Draft, path: str, value: Any) -> None:
    try:
        policy = policy_value(value)
    except ValueError as error:
        draft.lost(path, value, f'{error}. AutoPolicy, the default, finds the repeated blocks')
        return
    why = 'the same policy; modules that cannot be units are passed over, with a line in the plan'
    draft.becomes(path, value, {'model_wrapper_cfg.wrap_policy': policy}, why)


def _ignored_modules(draft: Draft, path: str, value: Any) -> None:
    names = list(value) if isinstance(value, (list, tuple)) else [value]
    if not names or not all(isinstance(name, str) for name in names):
        draft.lost(path, value, "name the modules: overrides=[dict(units=['backbone.stem'], shard=False)]")
        return
    if draft.stage == 0:
        draft.lost(path, value, 'at stage 0 every rank keeps all')
        return
    policy = draft.get('model_wrapper_cfg.wrap_policy')
    named = dict(type='ModuleNamePolicy', names=names)
    targets = {
        'model_wrapper_cfg.wrap_policy': ['AutoPolicy' if policy is None else policy, named],
        'model_wrapper_cfg.overrides': [dict(units=names, shard=False)],
    }
    why = 'each is a unit that every rank keeps whole; its gradients are averaged, which FSDP left undone'
    draft.becomes(path, value, targets, why)


def _use_orig_params(draft: Draft, path: str, value: Any) -> None:
    draft.needless(path, value, 'parameters always keep their names and shapes, and groups of the optimizer are theirs')


def _sync_module_states(draft: Draft, path: str, value: Any) -> None:
    why = 'every rank gets the parameters and buffers of rank 0'
    (draft.needless if value else draft.differs)(path, value, why)


_PREFETCH = 'FSDP2 gathers the next unit while one computes; docs/prefetch.md has what gathers earlier'
_NO_GROUPS = 'a process group cannot stand in a config; say model_wrapper_cfg.mesh=dict(replicate=..., shard=...)'


def _mixed_precision(draft: Draft, path: str, value: Any) -> None:
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if not isinstance(value, Mapping):
        draft.faults.add(path, f'got {value!r}; {OWNER} takes a dict or a MixedPrecision')
        return
    answer_all(draft, path, value, MIXED_PRECISION_ANSWERS, 'MixedPrecision')
    param_dtype = value.get('param_dtype')
    if param_dtype is not None and value.get('reduce_dtype') is None and dtype_name(param_dtype) != 'float32':
        why = (
            f'gradients were reduced in {dtype_name(param_dtype)}, and are in float32 now; '
            f"precision.reduce_dtype='{dtype_name(param_dtype)}' is the old way"
        )
        draft.differs(f'{path}.reduce_dtype', None, why)


def _param_dtype(draft: Draft, path: str, value: Any) -> None:
    name = dtype_name(value)
    if name == 'float32':
        amp = [one for one, wrapper in draft.optimizers() if type_name(wrapper.get('type', '')) == 'AmpOptimWrapper']
        if amp:
            why = f"units are gathered in the dtype of {amp[0]}; with type='OptimWrapper' there they stay float32"
            draft.differs(path, value, why)
        else:
            draft.needless(path, value, 'float32 is the default')
        return
    if name not in DTYPES:
        draft.faults.add(path, f'got {value!r}; expected the name of a dtype{near_names(str(name), DTYPES)}')
        return
    why = (
        f'units are gathered and computed in {name} under autocast; what no unit holds, losses, master weights and '
        'optimizer state are float32'
    ) + ('. The loss is scaled' if name == 'float16' else '')
    targets = draft.for_optimizers('dtype', name)
    if targets:
        draft.becomes(path, value, targets, why)
    else:
        draft.becomes(path, value, {'model_wrapper_cfg.precision.param_dtype': name}, why)


def _reduce_dtype(draft: Draft, path: str, value: Any) -> None:
    name = dtype_name(value)
    if name == 'float32':
        draft.needless(path, value, 'gradients are reduced in float32 by default')
    elif draft.stage == 0:
        draft.lost(path, value, 'at stage 0 DDP reduces gradients in the dtype of the weights, float32')
    else:
        targets = {'model_wrapper_cfg.precision.reduce_dtype': name}
        draft.becomes(path, value, targets, 'the same; float32, the default, is more exact')


def _buffer_dtype(draft: Draft, path: str, value: Any) -> None:
    if dtype_name(value) == 'float32':
        draft.needless(path, value, 'nothing casts buffers')
    else:
        draft.lost(path, value, 'nothing casts buffers: statistics and positions stay as the model registers them')


def _cast_inputs(draft: Draft, path: str, value: Any) -> None:
    if value:
        why = (
            'inputs of units stay as they come, and boxes and reference points keep their precision; autocast casts '
            'those of linear layers and convolutions. overrides=[dict(units=..., cast_forward_inputs=True)] casts all'
        )
        draft.differs(path, value, why)
    else:
        draft.needless(path, value, 'inputs of units stay as they come')


MIXED_PRECISION_ANSWERS: dict[str, Answer] = {
    'param_dtype': _param_dtype,
    'reduce_dtype': _reduce_dtype,
    'buffer_dtype': _buffer_dtype,
    'keep_low_precision_grads': needless('shards, their gradients and the step are float32'),
    'cast_forward_inputs': _cast_inputs,
    'cast_root_forward_inputs': _cast_inputs,
    '_module_classes_to_ignore': lost(
        'batch and instance norms are float32 by themselves; name other modules in precision.keep_fp32, by patterns'
    ),
}

FSDP_ANSWERS: dict[str, Answer] = {
    'sharding_strategy': _sharding_strategy,
    'auto_wrap_policy': _auto_wrap_policy,
    'cpu_offload': _cpu_offload,
    'mixed_precision': _mixed_precision,
    'ignored_modules': _ignored_modules,
    'ignored_parameters': lost('parameters go with their modules: overrides=[dict(units=..., shard=False)]'),
    'ignored_states': lost('they go with their modules: overrides=[dict(units=..., shard=False)]'),
    'backward_prefetch': needless(_PREFETCH),
    'forward_prefetch': needless(_PREFETCH),
    'limit_all_gathers': needless('FSDP2 bounds what is gathered by the order of its streams'),
    'use_orig_params': _use_orig_params,
    'sync_module_states': _sync_module_states,
    'param_init_fn': lost(
        "ranks other than 0 build on meta and get rank 0's values, as init_weights and init_cfg make them; initialise "
        'there'
    ),
    'device_id': needless('ranks find their device'),
    'process_group': lost(_NO_GROUPS),
    'device_mesh': lost(_NO_GROUPS),
}


def _tell_of_steps(draft: Draft) -> None:
    for path, wrapper in draft.optimizers():
        if wrapper.get('clip_grad') is not None and draft.stage > 0:
            why = 'each rank clipped by the norm of its own shards; now the norm is that of all ranks, as under DDP'
            draft.differs(f'{path}.clip_grad', wrapper['clip_grad'], why)
        count = wrapper.get('accumulative_counts', 1)
        if draft.stage in (2, 3) and isinstance(count, int) and count > 1:
            other = 'model_wrapper_cfg.no_sync=True' if draft.stage == 3 else 'model_wrapper_cfg.stage=1'
            why = (
                'whole gradients stayed on every rank between micro-batches; now each micro-batch is reduced into '
                f'shards, which saves 4 bytes per parameter. {other} is the old way'
            )
            draft.differs(f'{path}.accumulative_counts', count, why)
