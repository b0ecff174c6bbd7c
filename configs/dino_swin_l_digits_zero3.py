# The full DINO with Swin-L (218 M parameters) on the digits, from scratch: a few iterations, on CPUs too.
_base_ = ['./dino_swin_l_zero3.py', './_base_/digits.py']

load, annotate, _, pack = _base_.digits_pipeline
# Two-stage DINO chooses 900 queries among the features, which takes at least this size.
pipeline = [load, annotate, dict(type='Resize', scale=(128, 128), keep_ratio=True), pack]

train_dataloader = dict(_base_.digits_train, batch_size=1)
train_dataloader['dataset'] = dict(train_dataloader['dataset'], pipeline=pipeline)
val_dataloader = dict(_base_.digits_val, batch_size=1)
val_dataloader['dataset'] = dict(val_dataloader['dataset'], pipeline=pipeline)
test_dataloader = val_dataloader
val_evaluator = _base_.digits_metric
test_evaluator = _base_.digits_metric

model = dict(backbone=dict(init_cfg=None), bbox_head=dict(num_classes=10))
train_cfg = dict(_delete_=True, type='IterBasedTrainLoop', max_iters=8, val_begin=9)  # tools/test.py evaluates
param_scheduler = [dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=4)]
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(by_epoch=False, interval=4, max_keep_ckpts=1))
log_processor = dict(by_epoch=False)
randomness = dict(seed=0)
