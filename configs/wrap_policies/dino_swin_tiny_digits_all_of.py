# What all make a unit, and Not takes away from: the blocks but for those of the first stage.
_base_ = ['../_base_/dino_swin_tiny_digits.py', '../_base_/zero3.py']

model_wrapper_cfg = dict(
    wrap_policy=dict(
        type='AllOf',
        policies=[
            'AutoPolicy',
            dict(type='Not', policy=dict(type='ModuleNamePolicy', names=['backbone.stages.0.**'])),
        ],
    ),
)
