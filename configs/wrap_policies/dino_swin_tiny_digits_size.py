# Units of at least 50,000 and at most 600,000 parameters.
_base_ = ['../_base_/dino_swin_tiny_digits.py', '../_base_/zero3.py']

model_wrapper_cfg = dict(
    wrap_policy=dict(type='SizePolicy', min_params=50_000, max_params=600_000),
)
