"""Keys of DeepSpeed's config, as DeepSpeedStrategy takes them."""

from collections.abc import Mapping
from typing import Any

from mmzero.runner.migrate.draft import Answer, Draft, answer_all, lost, needless
from mmzero.runner.migrate.ds_zero import migrate_zero
from mmzero.runner.migrate.values import dtype_name

OPTIONS = 'model_wrapper_cfg.engine_options'


def pass_through(draft: Draft, path: str, value: Any, key: str) -> None:
    """Hand a key on to DeepSpeed.

    Args:
        draft (Draft): Takes the outcome.
        path (str): Where the config had it.
        value (Any): What it says.
        key (str): Its place in DeepSpeed's config, with dots.
    """
    draft.becomes(path, value, {f'{OPTIONS}.{key}': value}, "DeepSpeed's own, which gets it as it is")


def _rest(draft: Draft, path: str, given: Mapping[str, Any], key: str, answers: Mapping[str, Answer]) -> None:
    """What of a group is no mmzero field: DeepSpeed gets it, or it is answered for FSDP2."""
    if draft.engine == 'deepspeed':
        for name, value in given.items():
            pass_through(draft, f'{path}.{name}', value, f'{key}.{name}')
    else:
        answer_all(draft, path, given, answers, f"DeepSpeed's {key}")


def _clipping(draft: Draft, path: str, value: Any) -> None:
    if not value:
        draft.needless(path, value, 'gradients are not clipped by default')
        return
    targets = draft.for_optimizers('clip_grad', dict(max_norm=value))
    _on_optimizers(draft, path, value, targets, "the norm of all ranks' gradients is what is clipped and logged")


def _accumulation(draft: Draft, path: str, value: Any) -> None:
    if value == 1:
        draft.needless(path, value, 'each batch makes a step by default')
        return
    targets = draft.for_optimizers('accumulative_counts', value)
    _on_optimizers(draft, path, value, targets, 'iterations still count batches, and schedulers go by iterations')


def _on_optimizers(draft: Draft, path: str, value: Any, targets: Mapping[str, Any], why: str) -> None:
    if targets:
        draft.becomes(path, value, targets, why)
    else:
        draft.needless(path, value, 'the config has no optimizer')


def _micro_batch(draft: Draft, path: str, value: Any) -> None:
    size = draft.get('train_dataloader.batch_size')
    if size == value:
        draft.needless(path, value, 'train_dataloader.batch_size says it')
    else:
        draft.differs(path, value, f'FlexibleRunner overwrote it by train_dataloader.batch_size, {size}, which says it')


def _dtype(draft: Draft, path: str, dtype: str, why: str, **more: Any) -> None:
    targets = {}
    for name, value in dict(dtype=dtype, **more).items():
        targets.update(draft.for_optimizers(name, value))
    _on_optimizers(draft, f'{path}.enabled', True, targets, why)


_HALF = 'the float32 master weights stay with the optimizer, and autocast picks what operators compute in'


def _fp16(draft: Draft, path: str, value: Any) -> None:
    if not _group(draft, path, value):
        return
    given = {name: item for name, item in value.items() if name != 'enabled'}
    scale = given.pop('loss_scale', 0)
    power, window = given.pop('initial_scale_power', 16), given.pop('loss_scale_window', 1000)
    # DeepSpeed takes numbers such as 1e3 here; the scaler counts steps.
    dynamic = dict(init_scale=float(2**power), growth_interval=int(window))
    why = f'{_HALF}; the scale begins and grows as it did. bfloat16 needs none'
    _dtype(draft, path, 'float16', why, loss_scale=float(scale) if scale else dynamic)
    _rest(draft, path, given, 'fp16', FP16_ANSWERS)


def _bf16(draft: Draft, path: str, value: Any) -> None:
    if _group(draft, path, value):
        _dtype(draft, path, 'bfloat16', _HALF)
        _rest(draft, path, {name: item for name, item in value.items() if name != 'enabled'}, 'bf16', BF16_ANSWERS)


def _amp(draft: Draft, path: str, value: Any) -> None:
    if _group(draft, path, value):
        _dtype(draft, path, 'float16', "autocast in float16 with a loss scale takes apex's place", loss_scale='dynamic')
        for name, item in value.items():
            if name != 'enabled':
                draft.lost(f'{path}.{name}', item, "it is apex's, which is not used")


def _torch_autocast(draft: Draft, path: str, value: Any) -> None:
    if _group(draft, path, value):
        _dtype(draft, path, dtype_name(value.get('dtype', 'bfloat16')), _HALF)
        for name, item in value.items():
            if name not in ('enabled', 'dtype'):
                draft.lost(f'{path}.{name}', item, 'which modules stay float32 is said by precision.keep_fp32')


def _group(draft: Draft, path: str, value: Any) -> bool:
    """Whether a group that can be enabled is."""
    if not isinstance(value, Mapping):
        draft.faults.add(path, f'got {value!r}; expected a dict')
        return False
    if not value.get('enabled', False):
        draft.needless(path, value, 'it is not enabled')
        return False
    return True


def _zero(draft: Draft, path: str, value: Any) -> None:
    if isinstance(value, bool):
        # Long deprecated: True was stage 1.
        value = dict(stage=int(value))
    if not isinstance(value, Mapping):
        draft.faults.add(path, f'got {value!r}; expected a dict')
        return
    given = migrate_zero(draft, path, value)
    if draft.engine == 'deepspeed':
        for name, item in given.items():
            pass_through(draft, f'{path}.{name}', item, f'zero_optimization.{name}')


def _communication(draft: Draft, path: str, value: Any) -> None:
    name = {'fp32': 'float32', 'fp16': 'float16', 'bf16': 'bfloat16', 'bfp16': 'bfloat16'}.get(value)
    if name == 'float32':
        draft.needless(path, value, 'gradients are reduced in float32 by default')
    elif name is None or draft.stage == 0:
        draft.lost(path, value, 'gradients are reduced in float32; precision.reduce_dtype of stages 1 to 3 is another')
    else:
        draft.becomes(path, value, {'model_wrapper_cfg.precision.reduce_dtype': name}, 'gradients are reduced in it')


def _scheduler(draft: Draft, path: str, value: Any) -> None:
    draft.lost(
        path, value, "DeepSpeed changed the learning rate beside MMEngine's schedulers; say it in param_scheduler"
    )


_CHECKPOINTING = (
    'it sets up deepspeed.checkpointing, which MMEngine calls for no module. '
    'model_wrapper_cfg.activation_checkpointing names what is recomputed, and with '
    "offload='cpu' inputs are kept in host memory"
)
_LOGS = "MMEngine's hooks log; LoggerHook.interval says how often"
_MONITORS = 'visualizer.vis_backends of MMEngine says where logs go'
_SCALED = "gradients are averaged over ranks, which torch's collectives do"
_OTHER_PARALLEL = 'it is for other kinds of parallelism than of data'
_OTHER_TRAINING = 'it changes how a model is trained, and only DeepSpeed has it'

FP16_ANSWERS: dict[str, Answer] = {
    'hysteresis': lost("torch's GradScaler halves the scale at the first overflow"),
    'consecutive_hysteresis': lost("torch's GradScaler halves the scale at the first overflow"),
    'min_loss_scale': lost("torch's GradScaler has no least scale; optim_wrapper.max_skips ends a run that only skips"),
    'auto_cast': needless('autocast casts what operators want'),
    'fp16_master_weights_and_grads': lambda draft, path, value: (draft.lost if value else draft.needless)(
        path, value, 'master weights and the gradients of their shards are float32'
    ),
}

BF16_ANSWERS: dict[str, Answer] = {
    'immediate_grad_update': needless('gradients are reduced as backward comes to them'),
    'check_grad_overflow': needless('a step with gradients that are not finite is skipped: optim_wrapper.max_skips'),
    'check_overflow': needless('a step with gradients that are not finite is skipped: optim_wrapper.max_skips'),
    'bf16_master_weights_and_grads': FP16_ANSWERS['fp16_master_weights_and_grads'],
    'bf16_optimizer_states': lost('optimizer state has the dtype of the master weights, float32'),
}

# Under every engine mmzero has fields for these, or DeepSpeed's own part has no place in a run of MMEngine. Of
# `zero_optimization`, `fp16` and `bf16` DeepSpeed gets what mmzero has no field for.
NOT_PASSED = frozenset(
    {
        'zero_optimization',
        'gradient_clipping',
        'gradient_accumulation_steps',
        'managed_gradient_accumulation',
        'train_micro_batch_size_per_gpu',
        'train_batch_size',
        'fp16',
        'bf16',
        'bfloat16',
        'amp',
        'torch_autocast',
        'communication_data_type',
        'optimizer',
        'scheduler',
        'activation_checkpointing',
        'steps_per_print',
        'autotuning',
        'checkpoint',
        'compile',
        'data_efficiency',
        'dataloader_drop_last',
        'datastates_ckpt',
        'expert_parallel',
        'hybrid_engine',
        'pipeline',
        'sequence_parallel_size',
        'tensor_parallel',
        'use_data_before_expert_parallelism',
        'weight_quantization',
    }
)

DS_ANSWERS: dict[str, Answer] = {
    'zero_optimization': _zero,
    'gradient_clipping': _clipping,
    'gradient_accumulation_steps': _accumulation,
    'train_micro_batch_size_per_gpu': _micro_batch,
    'train_batch_size': needless('it is train_dataloader.batch_size times accumulative_counts times the ranks'),
    'fp16': _fp16,
    'bf16': _bf16,
    'bfloat16': _bf16,
    'amp': _amp,
    'torch_autocast': _torch_autocast,
    'optimizer': lost('optim_wrapper.optimizer is the one that MMEngine built, and DeepSpeed stepped'),
    'scheduler': _scheduler,
    'activation_checkpointing': lost(_CHECKPOINTING),
    'aio': needless("it is for NVMe, which is read and written under engine='deepspeed'"),
    'communication_data_type': _communication,
    'seq_parallel_communication_data_type': lost(_OTHER_PARALLEL),
    'steps_per_print': needless(_LOGS),
    'wall_clock_breakdown': lost('tools/analysis_tools/measure_step.py measures a step'),
    'memory_breakdown': lost('tools/analysis_tools/measure_step.py measures a step'),
    'dump_state': needless('the log has the whole config'),
    'flops_profiler': lost('mmengine.analysis.get_model_complexity_info counts operations'),
    'comms_logger': lost('tools/analysis_tools/measure_step.py counts collectives'),
    'timers': needless(_LOGS),
    'tensorboard': lost(_MONITORS),
    'wandb': lost(_MONITORS),
    'comet': lost(_MONITORS),
    'csv_monitor': lost(_MONITORS),
    'monitor_config': lost(_MONITORS),
    'log_level': needless(_LOGS),
    'prescale_gradients': needless(_SCALED),
    'gradient_predivide_factor': needless(_SCALED),
    'gradient_allreduce_op': lambda draft, path, value: (draft.needless if value == 'mean' else draft.lost)(
        path, value, _SCALED
    ),
    'sparse_gradients': lost('gradients are dense'),
    'disable_allgather': needless('FSDP2 gathers unit by unit'),
    'disable_python_gc': lost("gc.disable() in a hook's before_train does so"),
    'zero_allow_untested_optimizer': needless('every optimizer is tried on shards; docs/optimizers.md has which step'),
    'zero_force_ds_cpu_optimizer': needless("torch's optimizers step in host memory, with a fused kernel for Adam"),
    'data_types': lost('gradients are accumulated in float32 shards, and buffers stay as they are'),
    'dataloader_drop_last': needless('train_dataloader.drop_last says it'),
    'checkpoint': lost('the top-level checkpoint says how checkpoints are written'),
    'datastates_ckpt': lost('checkpoint=dict(async_save=True) writes beside training'),
    'nebula': lost('checkpoint=dict(async_save=True) writes beside training'),
    'compile': lost('model_wrapper_cfg.compile compiles each unit'),
    'elasticity': lost('torchrun restarts ranks, and a sharded checkpoint goes on with any number of them'),
    'autotuning': lost('tools/print_plan.py compares policies before a run'),
    'hybrid_engine': lost(_OTHER_TRAINING),
    'data_efficiency': lost(_OTHER_TRAINING),
    'curriculum_learning': lost(_OTHER_TRAINING),
    'compression_training': lost(_OTHER_TRAINING),
    'progressive_layer_drop': lost(_OTHER_TRAINING),
    'eigenvalue': lost(_OTHER_TRAINING),
    'quantize_training': lost(_OTHER_TRAINING),
    'weight_quantization': lost(_OTHER_TRAINING),
    'sparse_attention': lost(_OTHER_TRAINING),
    'pipeline': lost(_OTHER_PARALLEL),
    'tensor_parallel': lost(_OTHER_PARALLEL),
    'expert_parallel': lost(_OTHER_PARALLEL),
    'sequence_parallel_size': lost(_OTHER_PARALLEL),
    'data_parallel_size': lost(_OTHER_PARALLEL),
    'use_data_before_expert_parallelism': lost(_OTHER_PARALLEL),
    'vocabulary_size': needless('it is for a warning of DeepSpeed'),
    'managed_gradient_accumulation': needless('optim_wrapper.accumulative_counts says when a step is due'),
}
