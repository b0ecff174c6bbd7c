"""A complete config of a small DINO on a few images of digits, for tests that run the runner or the tools."""

import copy
from typing import Any

from mmengine.config import Config

from tests.models import DINO_BLOCKS, TINY_DINO


def digits_config(data_root: str, work_dir: str, **changes: Any) -> Config:
    """Build the config.

    Args:
        data_root (str): Written by ``tools/dataset_converters/digits_coco.py``.
        work_dir (str): Work dir of the run.
        **changes: Dotted keys, with ``__`` for the dot, and their values.

    Returns:
        Config: 4 iterations over 8 images on one rank, a checkpoint every epoch of 2.
    """
    root = data_root.rstrip('/') + '/'
    pipeline = [
        dict(type='LoadImageFromFile'),
        dict(type='LoadAnnotations', with_bbox=True),
        dict(type='RandomFlip', prob=0.5),
        dict(type='PackDetInputs'),
    ]
    test_pipeline = [
        dict(type='LoadImageFromFile'),
        dict(type='Resize', scale=(64, 64), keep_ratio=True),
        dict(type='LoadAnnotations', with_bbox=True),
        dict(type='PackDetInputs', meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')),
    ]
    metainfo = dict(classes=tuple('0123456789'))

    def loader(split: str, steps: list, **more: Any) -> dict:
        dataset = dict(
            type='CocoDataset',
            data_root=root,
            metainfo=metainfo,
            ann_file=f'annotations/{split}.json',
            data_prefix=dict(img=f'{split}/'),
            pipeline=steps,
            **more,
        )
        sampler = dict(type='DefaultSampler', shuffle=split == 'train')
        return dict(batch_size=2, num_workers=0, sampler=sampler, dataset=dataset)

    model = copy.deepcopy(TINY_DINO)
    model['bbox_head']['num_classes'] = 10
    evaluator = dict(type='CocoMetric', ann_file=f'{root}annotations/val.json', metric='bbox')
    cfg = Config(
        dict(
            default_scope='mmdet',
            runner_type='mmzero.ZeroRunner',
            model_wrapper_cfg=dict(
                type='ZeroModelWrapper', stage=3, wrap_policy=dict(type='ModuleClassPolicy', classes=list(DINO_BLOCKS))
            ),
            model=model,
            train_dataloader=loader('train', pipeline),
            val_dataloader=loader('val', test_pipeline, test_mode=True),
            test_dataloader=loader('val', test_pipeline, test_mode=True),
            val_evaluator=evaluator,
            test_evaluator=dict(evaluator),
            train_cfg=dict(type='EpochBasedTrainLoop', max_epochs=2, val_interval=1),
            val_cfg=dict(type='ValLoop'),
            test_cfg=dict(type='TestLoop'),
            optim_wrapper=dict(
                type='OptimWrapper',
                optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.05),
                clip_grad=dict(max_norm=0.1),
                paramwise_cfg=dict(custom_keys=dict(backbone=dict(lr_mult=0.1))),
            ),
            param_scheduler=[dict(type='LinearLR', start_factor=0.1, begin=0, end=4, by_epoch=False)],
            default_hooks=dict(
                timer=dict(type='IterTimerHook'),
                logger=dict(type='LoggerHook', interval=1),
                param_scheduler=dict(type='ParamSchedulerHook'),
                checkpoint=dict(type='CheckpointHook', interval=1),
                sampler_seed=dict(type='DistSamplerSeedHook'),
            ),
            env_cfg=dict(mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0), dist_cfg=dict(backend='nccl')),
            randomness=dict(seed=0),
            launcher='none',
            work_dir=work_dir,
            log_level='INFO',
        )
    )
    cfg.merge_from_dict({key.replace('__', '.'): value for key, value in changes.items()})
    return cfg
