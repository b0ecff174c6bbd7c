"""Configs of DeepSpeed as they stand in its manual, in that of Hugging Face, in tutorials and in notes.

They are written anew, with small numbers of samples: two ranks with two samples each.
"""

from dataclasses import dataclass, field
from typing import Any

AUTO = 'auto'


@dataclass(frozen=True)
class Case:
    """A file, and what becomes of it.

    Args:
        options (dict or str): The file.
        refused (tuple[str, ...]): Parts of the error, one for each fault. Defaults to none: it trains.
        run (dict): What else the run's config says.
    """

    options: dict[str, Any] | str
    refused: tuple[str, ...] = ()
    run: dict[str, Any] = field(default_factory=dict)


def adamw(**fields: Any) -> dict[str, Any]:
    return dict(optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=3e-5), **fields))


BASE = dict(train_micro_batch_size_per_gpu=2, steps_per_print=2000, wall_clock_breakdown=False)
AUTO_BATCH = dict(
    train_batch_size=AUTO,
    train_micro_batch_size_per_gpu=AUTO,
    gradient_accumulation_steps=AUTO,
    gradient_clipping=AUTO,
    steps_per_print=2000,
    wall_clock_breakdown=False,
)
AUTO_FP16 = dict(
    enabled=AUTO, loss_scale=0, loss_scale_window=1000, initial_scale_power=16, hysteresis=2, min_loss_scale=1
)
AUTO_OPTIMIZER = dict(type='AdamW', params=dict(lr=AUTO, betas=AUTO, eps=AUTO, weight_decay=AUTO))
AUTO_SCHEDULER = dict(type='WarmupLR', params=dict(warmup_min_lr=AUTO, warmup_max_lr=AUTO, warmup_num_steps=AUTO))
STAGE_2 = dict(
    stage=2,
    allgather_partitions=True,
    allgather_bucket_size=2e8,
    overlap_comm=True,
    reduce_scatter=True,
    reduce_bucket_size=2e5,
    contiguous_gradients=True,
)
STAGE_3 = dict(
    stage=3,
    overlap_comm=True,
    contiguous_gradients=True,
    sub_group_size=1e9,
    reduce_bucket_size=AUTO,
    stage3_prefetch_bucket_size=AUTO,
    stage3_param_persistence_threshold=AUTO,
    stage3_max_live_parameters=1e9,
    stage3_max_reuse_distance=1e9,
    stage3_gather_16bit_weights_on_model_save=True,
)
TO_CPU = dict(device='cpu', pin_memory=True)

CASES = {
    # That a manual shows first.
    'least': Case(dict(train_batch_size=4, zero_optimization=dict(stage=1))),
    'stage 1 with a bucket': Case(dict(BASE, zero_optimization=dict(stage=1, reduce_bucket_size=500_000))),
    'stage 2, clipping': Case(dict(BASE, gradient_clipping=1.0, zero_optimization=STAGE_2)),
    'stage 2, accumulation': Case(
        dict(train_batch_size=8, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2)
        | dict(zero_optimization=dict(stage=2, contiguous_gradients=True, overlap_comm=True))
    ),
    'stage 3, bfloat16': Case(dict(BASE, bf16=dict(enabled=True), zero_optimization=dict(stage=3))),
    'stage 3, tuned': Case(
        dict(BASE)
        | dict(
            zero_optimization=dict(
                stage=3,
                stage3_max_live_parameters=1e8,
                stage3_max_reuse_distance=1e8,
                stage3_prefetch_bucket_size=1e6,
                stage3_param_persistence_threshold=100,
                sub_group_size=1e6,
                round_robin_gradients=True,
            )
        )
    ),
    'stage 1, bfloat16, reduced in bfloat16': Case(
        dict(BASE, bf16=dict(enabled=True), communication_data_type='bf16', zero_optimization=dict(stage=1))
    ),
    'stage 2, bfloat16, accumulated in bfloat16': Case(
        dict(BASE, bf16=dict(enabled=True), data_types=dict(grad_accum_dtype='bf16'), zero_optimization=dict(stage=2))
    ),
    # With 'auto', as the integration of Hugging Face fills it.
    'auto, stage 2': Case(
        dict(AUTO_BATCH, fp16=AUTO_FP16, bf16=dict(enabled=AUTO), zero_optimization=STAGE_2)
        | dict(optimizer=AUTO_OPTIMIZER, scheduler=AUTO_SCHEDULER)
    ),
    'auto, stage 3': Case(
        dict(AUTO_BATCH, fp16=AUTO_FP16, bf16=dict(enabled=AUTO), zero_optimization=STAGE_3)
        | dict(optimizer=AUTO_OPTIMIZER, scheduler=AUTO_SCHEDULER),
        run=adamw(clip_grad=dict(max_norm=0.5), dtype='bfloat16'),
    ),
    'auto, stage 2, to the host': Case(dict(AUTO_BATCH, zero_optimization=dict(STAGE_2, offload_optimizer=TO_CPU))),
    'auto, stage 3, all to the host': Case(
        dict(AUTO_BATCH, bf16=dict(enabled=True))
        | dict(zero_optimization=dict(STAGE_3, offload_optimizer=TO_CPU, offload_param=TO_CPU))
    ),
    'the same optimizer and schedule': Case(
        dict(BASE, zero_optimization=dict(stage=2))
        | dict(
            optimizer=dict(type='Adam', params=dict(lr=3e-5, betas=[0.9, 0.999], eps=1e-8, weight_decay='3e-7')),
            scheduler=dict(
                type='WarmupLR',
                params=dict(warmup_min_lr=3e-6, warmup_max_lr=3e-5, warmup_num_steps=500, warmup_type='linear'),
            ),
        ),
        run=dict(
            optim_wrapper=dict(
                type='OptimWrapper', optimizer=dict(type='AdamW', lr=3e-5, betas=(0.9, 0.999), weight_decay=3e-7)
            ),
            param_scheduler=[dict(type='LinearLR', start_factor=3e-6 / 3e-5, by_epoch=False, begin=0, end=500)],
        ),
    ),
    'comments, and a last comma': Case(
        '{\n  // samples of a rank\n  "train_micro_batch_size_per_gpu": 2,\n'
        '  "zero_optimization": {"stage": 2, "cpu_offload": false},\n}'
    ),
    'logging and profiling': Case(
        dict(BASE, zero_optimization=dict(stage=2), dump_state=False, memory_breakdown=False)
        | dict(
            comms_logger=dict(enabled=False, verbose=False, prof_all=True, debug=False),
            flops_profiler=dict(enabled=False, profile_step=1, module_depth=-1, top_modules=1, detailed=True),
            tensorboard=dict(enabled=False, output_path='output/ds_logs/', job_name='train'),
            csv_monitor=dict(enabled=False, output_path='output/ds_logs/', job_name='train'),
        )
    ),
    # What says two things.
    'a batch that ranks cannot share': Case(
        dict(train_batch_size=1536, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=1536)
        | dict(zero_optimization=dict(stage=3)),
        ('here 2 x 1536 x 2 = 6144. For 1536, gradient_accumulation_steps', 'would be 384'),
    ),
    'other micro batch, clipping, stage, optimizer and lr': Case(
        dict(train_micro_batch_size_per_gpu=8, gradient_clipping=1.0, zero_optimization=dict(stage=2))
        | dict(optimizer=dict(type='SGD', params=dict(lr=1e-3))),
        (
            'train_micro_batch_size_per_gpu: got 8, and train_dataloader.batch_size is 2',
            'gradient_clipping: got 1.0, and optim_wrapper has clip_grad with max_norm=0.1',
            "optimizer.type: got 'SGD', which is SGD, and optim_wrapper.optimizer is AdamW",
            'optimizer.params.lr: got 0.001, and optim_wrapper.optimizer.lr is 3e-05',
        ),
        adamw(clip_grad=dict(max_norm=0.1)),
    ),
    'another schedule': Case(
        dict(BASE, zero_optimization=dict(stage=2))
        | dict(
            scheduler=dict(
                type='WarmupDecayLR',
                params=dict(total_num_steps=1000, warmup_min_lr=0, warmup_max_lr=3e-5, warmup_num_steps=100),
            )
        ),
        ("say param_scheduler=[dict(type='LinearLR', start_factor=1e-06, by_epoch=False, end=100), dict(",),
    ),
    # What DeepSpeed does not know.
    'misspelt': Case(
        dict(BASE, gradient_cliping=1.0, zero_optimisation=dict(stage=2))
        | dict(zero_optimization=dict(stage=2, overlap_com=True, offload_optimizer=dict(device='cpu', pinmemory=True))),
        (
            "gradient_cliping: DeepSpeed has no such key; did you mean 'gradient_clipping'",
            "zero_optimisation: DeepSpeed has no such key; did you mean 'zero_optimization'",
            "zero_optimization.overlap_com: DeepSpeed has no such key; did you mean 'overlap_comm'",
            "zero_optimization.offload_optimizer.pinmemory: DeepSpeed has no such key; did you mean 'pin_memory'",
        ),
    ),
    'of notes': Case(
        dict(BASE, gradient_checkpointing=True, parallelism=dict(data=2), bf16=dict(enabled=True, loss_scaling=True))
        | dict(zero_optimization=dict(stage=3, stage3_offload_param=True, stage1_param=dict())),
        (
            'gradient_checkpointing: DeepSpeed has no such key; what is meant is activation_checkpointing',
            'parallelism: DeepSpeed has no such key; what is meant is mesh of model_wrapper_cfg',
            'bf16.loss_scaling: DeepSpeed has no such key; what is meant is loss_scale of fp16',
            'zero_optimization.stage3_offload_param: DeepSpeed has no such key; what is meant is offload=dict(',
            'zero_optimization.stage1_param: DeepSpeed has no such key; what is meant is stage=1',
        ),
    ),
    'of another version': Case(
        dict(BASE, zero_optimization=dict(stage=3), amp=dict(enabled=True), elasticity=dict(enabled=False))
        | dict(aio=dict(block_size=262144, queue_depth=32, thread_count=1, single_submit=False, overlap_events=True)),
        (
            'amp: DeepSpeed does not take it: NVIDIA Apex AMP integration has been removed',
            'elasticity: DeepSpeed does not take it: Elastic training has been removed',
            'aio.thread_count: DeepSpeed has no such key; what is meant is intra_op_parallelism',
        ),
    ),
    # What has no place in a run of MMEngine.
    "others' business": Case(
        dict(BASE, zero_optimization=dict(stage=2), dataloader_drop_last=True, torch_autocast=dict(enabled=True))
        | dict(
            activation_checkpointing=dict(partition_activations=True, cpu_checkpointing=True),
            checkpoint=dict(tag_validation='Warn'),
            data_efficiency=dict(enabled=True),
        ),
        (
            'activation_checkpointing: is for models that call deepspeed.checkpointing',
            "checkpoint: is for DeepSpeed's own checkpoints",
            "data_efficiency: is for DeepSpeed's data loader",
            'dataloader_drop_last: use drop_last of train_dataloader',
            'torch_autocast: use optim_wrapper.dtype',
        ),
    ),
    'not there yet': Case(
        dict(BASE, bf16=dict(enabled=True, check_grad_overflow=False))
        | dict(
            zero_optimization=dict(
                stage=3,
                zero_quantized_weights=True,
                zero_quantized_gradients=True,
            )
        ),
        (
            'zero_optimization.zero_quantized_weights: is not supported yet',
            'zero_optimization.zero_quantized_gradients: is not supported yet',
            'bf16.check_grad_overflow: a step whose gradients are not finite is skipped',
        ),
    ),
    'what mmzero needs at stage 2': Case(
        dict(BASE, zero_optimization=dict(stage=2, round_robin_gradients=True, compute_grad_norm=False)),
        (
            'zero_optimization.round_robin_gradients: DeepSpeed then loses track',
            'zero_optimization.compute_grad_norm: a step whose gradients are not finite is skipped',
        ),
    ),
    'values that are none': Case(
        dict(BASE, zero_optimization=dict(stage=2, reduce_bucket_size=-1, overlap_comm='often')),
        ('zero_optimization.reduce_bucket_size: got -1', "zero_optimization.overlap_comm: got 'often'"),
    ),
    'both of 16 bit': Case(
        dict(BASE, fp16=dict(enabled=True), bf16=dict(enabled=True), zero_optimization=dict(stage=2)),
        (
            'engine_options: bf16 and fp16 are enabled; enable one',
            'enabled: got True, and optim_wrapper.dtype is float32',
        ),
    ),
    'hpZ': Case(dict(BASE, zero_optimization=dict(STAGE_3, zero_hpz_partition_size=2))),
    'hpZ at stage 2': Case(
        dict(BASE, zero_optimization=dict(stage=2, zero_hpz_partition_size=8)),
        ('zero_optimization.zero_hpz_partition_size: DeepSpeed has it at stage 3 only, got stage=2',),
    ),
    'parameters to the host at stage 2': Case(
        dict(BASE, zero_optimization=dict(STAGE_2, offload_param=TO_CPU)),
        ('offload.params: DeepSpeed has it at stage 3 only, got stage=2',),
    ),
    'stage 0': Case(
        dict(BASE, zero_optimization=dict(stage=0), gradient_clipping=1.0),
        ("engine_options: is DeepSpeed's config, and stage=0 is DDP under every engine",),
    ),
}
