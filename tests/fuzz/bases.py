"""Good configs that the fuzz test spoils: short runs, of vectors and of the digits DINO."""

import copy
from typing import Any

from mmengine.config import Config
from mmengine.registry import DATASETS, METRICS, MODELS

from tests.models import ToyModel
from tests.runs import digits_config
from tests.vectors import Count, Vectors

DOTTED = dict[str, Any]

# Changes of a run by name, beside the plain ones at each stage.
SETTINGS: dict[str, DOTTED] = {
    'stage 0': {
        'model_wrapper_cfg.stage': 0,
        'model_wrapper_cfg.broadcast_buffers': True,
        'model_wrapper_cfg.find_unused_parameters': True,
    },
    'stage 1': {'model_wrapper_cfg.stage': 1, 'optim_wrapper.accumulative_counts': 2},
    'stage 2': {'model_wrapper_cfg.stage': 2, 'optim_wrapper.clip_grad': dict(type='value', clip_value=0.5)},
    'stage 3': {
        'model_wrapper_cfg.stage': 3,
        'model_wrapper_cfg.find_unused_parameters': True,
        'optim_wrapper.clip_grad': dict(type='norm', max_norm=0.5, norm_type=2.0),
        'optim_wrapper.max_skips': 3,
        'model_wrapper_cfg.no_sync': True,
    },
    'bfloat16': {
        'optim_wrapper.type': 'AmpOptimWrapper',
        'optim_wrapper.dtype': 'bfloat16',
        'optim_wrapper.loss_scale': 'dynamic',
        'model_wrapper_cfg.precision': dict(reduce_dtype='float32'),
    },
    'mesh': {'model_wrapper_cfg.mesh': dict(replicate=1, shard=-1)},
}
TWO_RANKS: dict[str, DOTTED] = {
    'hsdp': {'model_wrapper_cfg.stage': 3, 'model_wrapper_cfg.mesh': dict(replicate=2, shard=1)},
    'sharded': {'model_wrapper_cfg.stage': 2, 'model_wrapper_cfg.mesh': dict(shard=2)},
}
MODELS_OF_RUNS = ('vectors', 'digits')


def register() -> None:
    """Let configs name the classes of the vector run."""
    for registry, cls in ((MODELS, ToyModel), (DATASETS, Vectors), (METRICS, Count)):
        registry.register_module(module=cls, force=True)


def base_config(name: str, setting: str, digits: str, work_dir: str) -> Config:
    """Build a good config.

    Args:
        name (str): 'vectors' or 'digits'.
        setting (str): A key of SETTINGS or TWO_RANKS.
        digits (str): Path of the digits data set.
        work_dir (str): Work dir of the run.

    Returns:
        Config: A run of two or three iterations and one validation.
    """
    cfg = _digits(digits, work_dir) if name == 'digits' else Config(_vectors(work_dir))
    changes = {**SETTINGS, **TWO_RANKS}[setting]
    for path, value in changes.items():
        *owner, key = path.split('.')
        node = cfg
        for name in owner:
            node = node[name]
        node[key] = copy.deepcopy(value)
    if setting in TWO_RANKS:
        cfg.launcher = 'pytorch'
    return cfg


def _digits(digits: str, work_dir: str) -> Config:
    cfg = digits_config(digits, work_dir, train_cfg__max_epochs=1)
    cfg.train_dataloader.dataset.indices = 4
    cfg.val_dataloader.dataset.indices = 2
    cfg.merge_from_dict(_COMMON)
    return cfg


_COMMON: DOTTED = {
    'log_processor': dict(type='LogProcessor', window_size=10, by_epoch=True),
    'auto_scale_lr': dict(enable=True, base_batch_size=2),
    'custom_hooks': [dict(type='EmptyCacheHook', before_epoch=False, after_iter=False)],
    'resume': False,
    'load_from': None,
    'find_unused_parameters': False,
}


def _vectors(work_dir: str) -> dict:
    def loader(shuffle: bool) -> dict:
        return dict(
            dataset=dict(type='Vectors', size=6),
            batch_size=2,
            num_workers=0,
            persistent_workers=False,
            drop_last=False,
            sampler=dict(type='DefaultSampler', shuffle=shuffle, round_up=True),
            collate_fn=dict(type='default_collate'),
        )

    return dict(
        **copy.deepcopy(_COMMON),
        runner_type='mmzero.ZeroRunner',
        model_wrapper_cfg=dict(
            type='ZeroModelWrapper', stage=3, wrap_policy=dict(type='ModuleClassPolicy', classes=['Block'])
        ),
        model=dict(type='ToyModel', width=12, depth=3, classes=7),
        train_dataloader=loader(True),
        val_dataloader=loader(False),
        test_dataloader=loader(False),
        val_evaluator=[dict(type='Count', prefix='count')],
        test_evaluator=[dict(type='Count', prefix='count')],
        train_cfg=dict(by_epoch=True, max_epochs=1, val_interval=1, val_begin=1),
        val_cfg=dict(type='ValLoop', fp16=False),
        test_cfg=dict(type='TestLoop'),
        optim_wrapper=dict(
            type='OptimWrapper',
            optimizer=dict(type='SGD', lr=0.01, momentum=0.9, weight_decay=1e-4, nesterov=True, foreach=None),
            paramwise_cfg=dict(
                bypass_duplicate=True,
                norm_decay_mult=0.0,
                bias_lr_mult=2.0,
                custom_keys={'blocks.0': dict(lr_mult=0.5)},
            ),
            accumulative_counts=1,
        ),
        param_scheduler=[
            dict(type='LinearLR', start_factor=0.1, begin=0, end=2, by_epoch=False),
            dict(type='MultiStepLR', milestones=[2, 3], gamma=0.1, by_epoch=False),
            dict(type='CosineAnnealingLR', T_max=3, eta_min=1e-4, convert_to_iter_based=True, end=3),
        ],
        default_hooks=dict(
            timer=dict(type='IterTimerHook'),
            logger=dict(type='LoggerHook', interval=1, log_metric_by_epoch=True),
            param_scheduler=dict(type='ParamSchedulerHook'),
            checkpoint=dict(type='CheckpointHook', interval=1, by_epoch=True, max_keep_ckpts=2, save_last=True),
            sampler_seed=dict(type='DistSamplerSeedHook'),
        ),
        visualizer=dict(type='Visualizer', vis_backends=[dict(type='LocalVisBackend')], name='visualizer'),
        env_cfg=dict(
            cudnn_benchmark=False,
            mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0),
            dist_cfg=dict(backend='gloo', timeout=60),
            resource_limit=4096,
        ),
        randomness=dict(seed=0, deterministic=False, diff_rank_seed=True),
        default_scope='mmengine',
        launcher='none',
        work_dir=work_dir,
        log_level='ERROR',
        experiment_name='fuzz',
    )
