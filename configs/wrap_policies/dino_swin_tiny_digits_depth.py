# Units two levels below the model: the stages of the backbone, the layers of encoder and decoder.
_base_ = ['../_base_/dino_swin_tiny_digits.py', '../_base_/zero3.py']

model_wrapper_cfg = dict(
    wrap_policy=dict(type='DepthPolicy', depth=2),
)
