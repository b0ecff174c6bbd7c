# Units by their qualified names: one segment for each star.
_base_ = ['../_base_/dino_swin_tiny_digits.py', '../_base_/zero3.py']

model_wrapper_cfg = dict(
    wrap_policy=dict(
        type='ModuleNamePolicy',
        names=['backbone.stages.*.blocks.*', 'encoder.layers.*', 'decoder.layers.*'],
    ),
)
