# Handwritten digits (tools/dataset_converters/digits_coco.py) in the place of COCO. The detector
# is this file's base and not its sibling, since two bases of one config may not share a key.
_base_ = 'mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py'

dataset_type = 'CocoDataset'
data_root = 'data/digits/'
metainfo = dict(classes=tuple('0123456789'))

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='Resize', scale=(64, 64), keep_ratio=True),  # no flip: it would make other symbols
    dict(type='PackDetInputs'),
]
test_pipeline = train_pipeline

train_dataloader = dict(
    _delete_=True,
    batch_size=8,
    num_workers=0,  # loading takes a hundredth of a step
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        metainfo=metainfo,
        ann_file='annotations/train.json',
        data_prefix=dict(img='train/'),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    _delete_=True,
    batch_size=10,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        metainfo=metainfo,
        ann_file='annotations/val.json',
        data_prefix=dict(img='val/'),
        test_mode=True,
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader

val_evaluator = dict(type='CocoMetric', ann_file=data_root + 'annotations/val.json', metric='bbox')
test_evaluator = val_evaluator
