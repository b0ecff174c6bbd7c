# Handwritten digits in COCO format, written by tools/dataset_converters/digits_coco.py. Two bases of a config may not
# share a key, so these carry a name of their own; the config that inherits them puts them in place.
digits_root = 'data/digits/'
digits_classes = tuple('0123456789')

digits_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='Resize', scale=(64, 64), keep_ratio=True),  # no flip: it would make other symbols
    dict(type='PackDetInputs'),
]
digits_train = dict(
    batch_size=8,
    num_workers=0,  # loading takes a hundredth of a step
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type='CocoDataset',
        data_root=digits_root,
        metainfo=dict(classes=digits_classes),
        ann_file='annotations/train.json',
        data_prefix=dict(img='train/'),
        pipeline=digits_pipeline,
    ),
)
digits_val = dict(
    batch_size=10,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='CocoDataset',
        data_root=digits_root,
        metainfo=dict(classes=digits_classes),
        ann_file='annotations/val.json',
        data_prefix=dict(img='val/'),
        test_mode=True,
        pipeline=digits_pipeline,
    ),
)
digits_metric = dict(type='CocoMetric', ann_file=f'{digits_root}annotations/val.json', metric='bbox')
