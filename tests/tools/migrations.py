"""Configs for MMEngine's FSDP and DeepSpeed, as its docs and public configs write them, on a small model."""

import json
from pathlib import Path
from typing import Any

from mmengine.config import Config
from torch import nn

SIZE_BASED = 'torch.distributed.fsdp.wrap.size_based_auto_wrap_policy'
BLOCK = 'tests.models.Block'
ADAMW = dict(type='AdamW', lr=0.01)


def layer_auto_wrap_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int, layer_cls: Any) -> bool:
    """A project's policy, as mmdet's example of large models has one."""
    return recurse or isinstance(module, tuple(layer_cls))


def checkpoint_check_fn(module: nn.Module, layer_cls: Any) -> bool:
    """A project's choice of what is recomputed."""
    return isinstance(module, tuple(layer_cls))


def optimizer(kind: str = 'OptimWrapper', **fields: Any) -> dict[str, Any]:
    return dict(type=kind, optimizer=dict(ADAMW), **fields)


def fsdp(wrapper: dict | None = None, **fields: Any) -> dict[str, Any]:
    more = {} if wrapper is None else dict(model_wrapper=wrapper)
    return dict(runner_type='FlexibleRunner', strategy=dict(type='FSDPStrategy', **more, **fields))


def deepspeed(**fields: Any) -> dict[str, Any]:
    return dict(
        runner_type='FlexibleRunner',
        strategy=dict(type='DeepSpeedStrategy', **fields),
        optim_wrapper=optimizer('DeepSpeedOptimWrapper'),
    )


BUCKETS = dict(
    allgather_partitions=True,
    reduce_scatter=True,
    allgather_bucket_size=50000000,
    reduce_bucket_size=50000000,
    overlap_comm=True,
    contiguous_gradients=True,
)
FP16 = dict(
    enabled=True,
    fp16_master_weights_and_grads=False,
    loss_scale=0,
    loss_scale_window=500,
    hysteresis=2,
    min_loss_scale=1,
    initial_scale_power=15,
)
BF16 = dict(param_dtype='bfloat16', reduce_dtype='bfloat16', buffer_dtype='bfloat16')

SOURCES: dict[str, dict[str, Any]] = {
    # mmengine's docs, mmpretrain's ViT.
    'fsdp, by size': dict(
        fsdp(dict(auto_wrap_policy=dict(type=SIZE_BASED, min_num_params=1e2))),
        optim_wrapper=optimizer('AmpOptimWrapper'),
    ),
    'fsdp, nothing said': fsdp(),
    # A project on motions.
    'fsdp, full state in bfloat16': fsdp(
        dict(
            auto_wrap_policy=dict(type='size_based_auto_wrap_policy', min_num_params=100),
            use_orig_params=True,
            mixed_precision=dict(BF16),
        ),
        state_dict_cfg=dict(
            state_dict_type='FULL_STATE_DICT',
            state_dict_config=dict(type='FullStateDictConfig', offload_to_cpu=True, rank0_only=True),
            optim_state_dict_config=dict(type='FullOptimStateDictConfig', offload_to_cpu=True, rank0_only=True),
        ),
    ),
    # mmdet's projects/example_largemodel.
    'fsdp, layers and what is recomputed': fsdp(
        dict(auto_wrap_policy=dict(type=f'{__name__}.layer_auto_wrap_policy', layer_cls=[BLOCK])),
        activation_checkpointing=dict(check_fn=dict(type=f'{__name__}.checkpoint_check_fn', layer_cls=[BLOCK])),
        skip_init_weights=True,
    ),
    'fsdp, within nodes': fsdp(
        dict(
            sharding_strategy='HYBRID_SHARD',
            backward_prefetch='BACKWARD_PRE',
            forward_prefetch=True,
            limit_all_gathers=True,
            sync_module_states=True,
        )
    ),
    'fsdp, gradients alone': dict(
        fsdp(dict(sharding_strategy='SHARD_GRAD_OP', cpu_offload=False), state_dict_cfg='full'),
        optim_wrapper=optimizer(accumulative_counts=2, clip_grad=dict(max_norm=1.0)),
        compile=dict(backend='eager', target='train_step'),
    ),
    'fsdp, not sharded': fsdp(dict(sharding_strategy='NO_SHARD'), env_kwargs=dict(randomness=dict(seed=3))),
    # mmengine's docs.
    'runner, offloaded': dict(model_wrapper_cfg=dict(type='MMFullyShardedDataParallel', cpu_offload=True)),
    'runner, ignored modules': dict(
        model_wrapper_cfg=dict(
            type='MMFullyShardedDataParallel',
            auto_wrap_policy=dict(type='transformer_auto_wrap_policy', transformer_layer_cls=[BLOCK]),
            mixed_precision=dict(param_dtype='float16', reduce_dtype='float32', cast_forward_inputs=True),
            ignored_modules=['stem'],
        ),
        optim_wrapper=optimizer('AmpOptimWrapper'),
    ),
    # mmpretrain's ViT.
    'deepspeed, stage 1 in float16': deepspeed(
        fp16=dict(FP16), inputs_to_half=['inputs'], zero_optimization=dict(BUCKETS, stage=1, cpu_offload=False)
    ),
    # mmengine's docs.
    'deepspeed, stage 3': deepspeed(
        fp16=dict(FP16), inputs_to_half=[0], zero_optimization=dict(BUCKETS, stage=3, cpu_offload=False)
    ),
    'deepspeed, nothing sharded': deepspeed(zero_optimization=dict(BUCKETS, stage=0)),
    # A project on videos.
    'deepspeed, bfloat16': dict(
        deepspeed(bf16=dict(enabled=True), inputs_to_half=['inputs'], zero_optimization=dict(BUCKETS, stage=2)),
        find_unused_parameters=True,
        resume=False,
    ),
    # xtuner's.
    'deepspeed, filled in': deepspeed(
        config=dict(
            bf16=dict(enabled=True),
            fp16=dict(enabled=False, initial_scale_power=16),
            gradient_accumulation_steps='auto',
            gradient_clipping='auto',
            train_micro_batch_size_per_gpu='auto',
            zero_allow_untested_optimizer=True,
            zero_force_ds_cpu_optimizer=False,
            zero_optimization=dict(overlap_comm=True, stage=2),
        ),
        exclude_frozen_parameters=True,
        gradient_accumulation_steps=2,
        gradient_clipping=1,
        train_micro_batch_size_per_gpu=1,
    ),
    # A project on 3D detection.
    'deepspeed, offloaded': dict(
        deepspeed(
            zero_optimization=dict(
                stage=2,
                offload_optimizer=dict(device='cpu', pin_memory=True),
                offload_param=dict(device='cpu', pin_memory=True),
                allgather_bucket_size=5e6,
                round_robin_gradients=True,
            ),
            gradient_clipping=0.1,
        ),
        optim_wrapper=dict(
            type='DeepSpeedOptimWrapper', optimizer=dict(type='DeepSpeedCPUAdam', lr=0.01, adamw_mode=True)
        ),
    ),
    'deepspeed, a file': deepspeed(config='{folder}/ds_config.json'),
}
"""By name, what the leaf says; its base is :func:`base`."""

DS_FILE = dict(
    train_batch_size=4,
    gradient_clipping=1.0,
    zero_optimization=dict(stage=3, stage3_max_live_parameters=1e9, stage3_param_persistence_threshold=1e4),
    torch_autocast=dict(enabled=True, dtype='bfloat16'),
    wall_clock_breakdown=False,
)


def base() -> dict[str, Any]:
    """What all have in common: two iterations of a small model."""
    return dict(
        model=dict(type='tests.models.ToyModel', scalar=False),
        train_dataloader=dict(
            dataset=dict(type='tests.vectors.Vectors', size=8),
            batch_size=2,
            num_workers=0,
            sampler=dict(type='DefaultSampler', shuffle=False),
            collate_fn=dict(type='default_collate'),
        ),
        train_cfg=dict(by_epoch=False, max_iters=2, val_interval=100),
        optim_wrapper=optimizer(),
        randomness=dict(seed=0),
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=100, by_epoch=False, save_last=False)),
        log_level='ERROR',
    )


def write_source(folder: Path, name: str) -> Path:
    """Write a base and a leaf as files.

    Returns:
        Path: The leaf.
    """
    leaf = SOURCES[name]
    if 'config' in leaf.get('strategy', {}) and isinstance(leaf['strategy']['config'], str):
        (folder / 'ds_config.json').write_text(json.dumps(DS_FILE))
        leaf = dict(leaf, strategy=dict(leaf['strategy'], config=leaf['strategy']['config'].format(folder=folder)))
    (folder / 'bases').mkdir(exist_ok=True)
    Config(base()).dump(folder / 'bases/base.py')
    file = folder / f'{name.replace(", ", "_").replace(" ", "_")}.py'
    file.write_text("_base_ = ['bases/base.py']\n" + Config(dict(leaf)).pretty_text)
    return file
