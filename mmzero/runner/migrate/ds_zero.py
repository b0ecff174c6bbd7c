"""The group ``zero_optimization`` of DeepSpeed's config."""

from collections.abc import Mapping
from typing import Any

from mmzero.engines.deepspeed.sections import combination_faults
from mmzero.runner.migrate.draft import Answer, Draft, answer_all, lost, needless

_OFFLOADED = {'offload_optimizer': 'optimizer', 'offload_param': 'params'}


def migrate_zero(draft: Draft, path: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Answer what mmzero has fields for, and under 'fsdp2' the rest, too.

    Args:
        draft (Draft): Takes the outcome.
        path (str): The config path of the group.
        given (Mapping[str, Any]): The group.

    Returns:
        dict[str, Any]: What is left for DeepSpeed; empty under 'fsdp2'.
    """
    given = {name: value for name, value in given.items() if value is not None}
    stage = given.pop('stage', 0)
    if type(stage) is not int or stage not in range(4):
        draft.faults.add(f'{path}.stage', f'got {stage!r}; allowed: 0, 1, 2, 3')
        return {}
    draft.becomes(f'{path}.stage', stage, {'model_wrapper_cfg.stage': stage}, _STAGES[stage])
    left: dict[str, Any] = {}
    on_disk = [
        isinstance(given.get(name), Mapping) and given[name].get('device') == 'nvme'
        for name in ('offload_param', 'offload_optimizer')
    ]
    for name in (*_OLD, *_OFFLOADED):
        if name in given:
            rest = _offload(draft, f'{path}.{name}', name, given.pop(name))
            left.update({_OLD.get(name, name): rest} if rest else {})
    if draft.engine == 'deepspeed':
        _mesh(draft, path, given)
        kept = {**given, **left}
        for key, why in [*combination_faults(kept, stage, *on_disk)]:
            *outer, name = key.split('.')
            place = kept[outer[0]] if outer else kept
            draft.lost(f'{path}.{key}', place.pop(name), why)
            if outer and not place:
                kept.pop(outer[0])
        return kept
    for name, rest in left.items():
        answer_all(draft, f'{path}.{name}', rest, OFFLOAD_ANSWERS, f"DeepSpeed's {name}")
    answer_all(draft, path, given, ZERO_ANSWERS, "DeepSpeed's zero_optimization")
    _mesh(draft, path, given)
    return {}


_STAGES = (
    'nothing is sharded, which is DDP',
    'optimizer state is sharded',
    'gradients and optimizer state are sharded',
    'parameters, gradients and optimizer state are sharded; units are what AutoPolicy finds',
)

_OLD = {'cpu_offload': 'offload_optimizer', 'cpu_offload_params': 'offload_param', 'cpu_offload_param': 'offload_param'}
"""Names that DeepSpeed had before."""


def _offload(draft: Draft, path: str, name: str, value: Any) -> dict[str, Any]:
    """Returns what of a group of offloading is no field of mmzero."""
    given = dict(device='cpu' if value else 'none') if isinstance(value, bool) else value
    if not isinstance(given, Mapping):
        draft.faults.add(path, f'got {value!r}; expected a dict with device')
        return {}
    rest = {key: item for key, item in given.items() if item is not None}
    device, folder = str(rest.pop('device', 'none')), rest.pop('nvme_path', None)
    field = _OFFLOADED[_OLD.get(name, name)]
    if device == 'none':
        draft.needless(path, value, 'nothing is offloaded by default')
        return {}
    if draft.engine == 'fsdp2' and device == 'nvme':
        draft.faults.add(f'{path}.device', "got 'nvme', which FSDP2 does not have; say --engine deepspeed")
        return {}
    if draft.stage == 0:
        draft.lost(path, value, 'at stage 0 every rank keeps all where it computes')
        return {}
    if draft.engine == 'deepspeed' and field == 'params' and draft.stage != 3:
        draft.lost(path, value, 'DeepSpeed offloads parameters at stage 3 alone')
        return {}
    targets = {f'model_wrapper_cfg.offload.{field}': device}
    if device == 'nvme' and folder is not None:
        targets['model_wrapper_cfg.offload.nvme_path'] = str(folder)
    both = '; FSDP2 keeps shards, their gradients and the optimizer state together, so that all three go'
    draft.becomes(f'{path}.device', device, targets, 'the same' + (both if draft.engine == 'fsdp2' else ''))
    return rest


def _mesh(draft: Draft, path: str, given: dict[str, Any]) -> None:
    size = given.pop('mics_shard_size', -1)
    if type(size) is int and size > 0:
        targets = {'model_wrapper_cfg.mesh': dict(replicate=-1, shard=size)}
        draft.becomes(f'{path}.mics_shard_size', size, targets, 'as many ranks share a copy, the others hold replicas')


def _hierarchical(draft: Draft, path: str, value: Any) -> None:
    if value in (0, 1):
        draft.needless(path, value, 'it is off')
        return
    draft.lost(
        path, value, f"say overrides=[dict(units='**', reshard_after_forward={value})]; it has to divide the ranks"
    )


def _ignore_unused(draft: Draft, path: str, value: Any) -> None:
    why = (
        'a parameter that no rank uses does not move. Where ranks use different ones, say '
        'model_wrapper_cfg.find_unused_parameters=True'
    )
    (draft.needless if value else draft.differs)(path, value, why)


def _quantized(draft: Draft, path: str, value: Any) -> None:
    if value:
        draft.lost(path, value, 'FSDP2 has no quantised collectives (ZeRO++)')
    else:
        draft.needless(path, value, 'nothing is quantised')


def _leaf_module(draft: Draft, path: str, value: Any) -> None:
    draft.lost(
        path, value, "say wrap_policy=dict(type='ModuleClassPolicy', classes=[...]), whose modules are gathered whole"
    )


_UNITS = 'FSDP2 gathers and reduces unit by unit, as wrap_policy cuts them, while others compute'
_SAVING = 'checkpoints are float32, and gathered tensor by tensor where they are one file'
_PERSISTENT = (
    'small parameters are gathered with their unit; overrides=[dict(units=..., shard=False)] keeps units whole'
)

OFFLOAD_ANSWERS: dict[str, Answer] = {
    'pin_memory': needless('host memory is pinned where there is a GPU'),
    'ratio': lost('all of it goes to host memory'),
    'buffer_count': needless(_UNITS),
    'buffer_size': needless(_UNITS),
    'max_in_cpu': needless('all of it is in host memory'),
    'pipeline': lost('copies overlap by streams; nothing is set'),
    'pipeline_read': needless('it is for NVMe'),
    'pipeline_write': needless('it is for NVMe'),
    'fast_init': needless('it is for NVMe'),
    'super_offload': lost("it is DeepSpeed's own; --engine deepspeed keeps it"),
    'cpuadam_cores_perc': lost('OMP_NUM_THREADS says how many threads step'),
}

ZERO_ANSWERS: dict[str, Answer] = {
    'mics_shard_size': lambda draft, path, value: None,  # said by the mesh
    'zero_hpz_partition_size': _hierarchical,
    'mics_hierarchical_params_gather': lost('replicas are reduced in one collective'),
    'ignore_unused_parameters': _ignore_unused,
    'zero_quantized_weights': _quantized,
    'zero_quantized_nontrainable_weights': _quantized,
    'zero_quantized_gradients': _quantized,
    'leaf_module': _leaf_module,
    **dict.fromkeys(
        (
            'contiguous_gradients',
            'reduce_scatter',
            'reduce_bucket_size',
            'use_multi_rank_bucket_allreduce',
            'allgather_partitions',
            'allgather_bucket_size',
            'allgather_sequential',
            'overlap_comm',
            'sub_group_size',
            'round_robin_gradients',
            'parameter_alignment',
            'grad_hooks',
            'legacy_stage1',
            'max_live_parameters',
            'max_reuse_distance',
            'module_granularity_threshold',
            'use_all_reduce_for_fetch_params',
            'prefetch_bucket_size',
            'stage3_max_live_parameters',
            'stage3_max_reuse_distance',
            'stage3_prefetch_bucket_size',
            'stage3_module_granularity_threshold',
            'stage3_use_all_reduce_for_fetch_params',
            'stage3_allgather_sequential',
        ),
        needless(_UNITS),
    ),
    **dict.fromkeys(
        (
            'param_persistence_threshold',
            'model_persistence_threshold',
            'stage3_param_persistence_threshold',
            'stage3_model_persistence_threshold',
        ),
        lost(_PERSISTENT),
    ),
    **dict.fromkeys(
        (
            'gather_16bit_weights_on_model_save',
            'stage3_gather_16bit_weights_on_model_save',
            'stage3_gather_fp16_weights_on_model_save',
            'load_from_fp32_weights',
            'elastic_checkpoint',
            'pipeline_loading_checkpoint',
        ),
        needless(_SAVING),
    ),
    'cpu_offload_use_pin_memory': needless('host memory is pinned where there is a GPU'),
    'compute_grad_norm': needless('norms are computed where gradients are clipped, or optim_wrapper.grad_norms asks'),
    'memory_efficient_linear': needless('linear layers keep what autograd keeps'),
    'override_module_apply': needless('modules stay as they are'),
    'log_trace_cache_warnings': needless('there is no trace of the order of modules'),
    'enable_sanity_checks': needless("they are of DeepSpeed's own code"),
    'save_muon_momentum_buffer_in_memory': needless("it is for DeepSpeed's Muon"),
    'zenflow': lost("it is DeepSpeed's own, and not supported yet"),
}
