"""Keys of DeepSpeed's config, as DeepSpeedStrategy takes them."""

from collections.abc import Mapping
from typing import Any

from mmzero.config.engine_options import wrapper_fields_of
from mmzero.engines.deepspeed.sections import SECTIONS
from mmzero.runner.migrate.draft import Answer, Draft, lost, needless
from mmzero.runner.migrate.ds_precision import PRECISION_ANSWERS, on_optimizers, pass_through
from mmzero.runner.migrate.ds_zero import migrate_zero


def _clipping(draft: Draft, path: str, value: Any) -> None:
    if not value:
        draft.needless(path, value, 'gradients are not clipped by default')
        return
    targets = draft.for_optimizers('clip_grad', dict(max_norm=value))
    on_optimizers(draft, path, value, targets, "the norm of all ranks' gradients is what is clipped and logged")


def _accumulation(draft: Draft, path: str, value: Any) -> None:
    if value == 1:
        draft.needless(path, value, 'each batch makes a step by default')
        return
    targets = draft.for_optimizers('accumulative_counts', value)
    on_optimizers(draft, path, value, targets, 'iterations still count batches, and schedulers go by iterations')


def _micro_batch(draft: Draft, path: str, value: Any) -> None:
    size = draft.get('train_dataloader.batch_size')
    if size == value:
        draft.needless(path, value, 'train_dataloader.batch_size says it')
    else:
        draft.differs(path, value, f'FlexibleRunner overwrote it by train_dataloader.batch_size, {size}, which says it')


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
    name = next((item for *_, item in wrapper_fields_of(dict(communication_data_type=value))), None)
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

# Under every engine mmzero has fields for these, or DeepSpeed's own part has no place in a run of MMEngine. Of
# `zero_optimization`, `fp16` and `bf16` DeepSpeed gets what mmzero has no field for.
NOT_PASSED = frozenset(
    {
        *SECTIONS,
        'zero_optimization',
        'gradient_clipping',
        'gradient_accumulation_steps',
        'train_micro_batch_size_per_gpu',
        'train_batch_size',
        'fp16',
        'bf16',
        'bfloat16',
        'amp',
        'communication_data_type',
        'optimizer',
        'scheduler',
        'steps_per_print',
    }
)

DS_ANSWERS: dict[str, Answer] = {
    'zero_optimization': _zero,
    'gradient_clipping': _clipping,
    'gradient_accumulation_steps': _accumulation,
    'train_micro_batch_size_per_gpu': _micro_batch,
    'train_batch_size': needless('it is train_dataloader.batch_size times accumulative_counts times the ranks'),
    **PRECISION_ANSWERS,
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
