# mmdet's DINO with the digits in COCO's place; two bases may not share keys, hence one above the
# other.
_base_ = 'mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py'

dataset_type = 'CocoDataset'
data_root = 'data/digits/'
metainfo = dict(classes=tuple('0123456789'))
image_scale = (96, 96)

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='Resize', scale=image_scale, keep_ratio=True),
    dict(type='PackDetInputs'),
]
test_pipeline = train_pipeline
train_dataloader = dict(
    _delete_=True,
    batch_size=16,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        metainfo=metainfo,
        ann_file='annotations/train.json',
        data_prefix=dict(img='train/'),
        pipeline=train_pipeline))
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
        pipeline=test_pipeline))
test_dataloader = val_dataloader

val_evaluator = dict(type='CocoMetric', ann_file=data_root + 'annotations/val.json', metric='bbox')
test_evaluator = val_evaluator
