# DINO on a Swin small enough to learn the digits in minutes on two CPU cores, from scratch.
_base_ = ['mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py', './digits.py']

train_dataloader = _base_.digits_train
val_dataloader = _base_.digits_val
test_dataloader = _base_.digits_val
val_evaluator = _base_.digits_metric
test_evaluator = _base_.digits_metric

# The width stays mmdet's 256: its DINO decoder works with no other.
levels = 2
attention = dict(num_levels=levels)
ffn = dict(feedforward_channels=256)
model = dict(
    num_queries=25,
    backbone=dict(
        _delete_=True,
        type='SwinTransformer',
        embed_dims=32,
        depths=(2, 2, 2),
        num_heads=(2, 4, 8),
        strides=(4, 2, 2),
        window_size=6,
        drop_path_rate=0.0,
        out_indices=(1, 2),
        with_cp=True,
        init_cfg=None,
    ),
    neck=dict(in_channels=[64, 128], num_outs=levels),
    encoder=dict(num_layers=1, layer_cfg=dict(self_attn_cfg=attention, ffn_cfg=ffn)),
    decoder=dict(num_layers=2, layer_cfg=dict(cross_attn_cfg=attention, ffn_cfg=ffn)),
    bbox_head=dict(num_classes=10, loss_cls=dict(loss_weight=2.0)),
    dn_cfg=dict(group_cfg=dict(num_dn_queries=20)),
    test_cfg=dict(max_per_img=25),
)

max_epochs = 3
train_cfg = dict(max_epochs=max_epochs, val_begin=2)
# A fresh backbone learns as fast as the rest; one group of parameters makes one call of each foreach kernel.
optim_wrapper = dict(optimizer=dict(lr=1.5e-3, foreach=True), paramwise_cfg=None)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.05, by_epoch=False, end=30),
    dict(type='CosineAnnealingLR', eta_min=1e-5, begin=1, end=max_epochs, convert_to_iter_based=True),
]

default_hooks = dict(logger=dict(interval=10), checkpoint=dict(max_keep_ckpts=2))
randomness = dict(seed=0)
