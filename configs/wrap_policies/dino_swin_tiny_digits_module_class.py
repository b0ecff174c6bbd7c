# Units by their class.
_base_ = ['../_base_/dino_swin_tiny_digits.py', '../_base_/zero3.py']

model_wrapper_cfg = dict(
    wrap_policy=dict(
        type='ModuleClassPolicy',
        classes=['SwinBlock', 'DeformableDetrTransformerEncoderLayer', 'DeformableDetrTransformerDecoderLayer'],
    ),
)
