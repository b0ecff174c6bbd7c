# The digits with a frozen first stage, which FrozenWholePolicy gathers in one piece.
_base_ = ['../../configs/dino_swin_tiny_digits_zero3.py']

custom_imports = dict(imports=['projects.custom_wrap_policy.frozen_whole'])
model = dict(backbone=dict(frozen_stages=1))
model_wrapper_cfg = dict(wrap_policy=dict(_delete_=True, type='FrozenWholePolicy', max_params=1_000_000))
