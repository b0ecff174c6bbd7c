# The digits with a small ResNet whose first two stages are frozen: FrozenWholePolicy gathers each in one piece.
_base_ = ['../../configs/dino_swin_tiny_digits_zero3.py']

custom_imports = dict(imports=['projects.custom_wrap_policy.frozen_whole'])
model = dict(
    backbone=dict(
        _delete_=True,
        type='ResNet',
        depth=18,
        base_channels=32,
        num_stages=3,
        strides=(1, 2, 2),
        dilations=(1, 1, 1),
        out_indices=(1, 2),
        frozen_stages=2,
        norm_eval=True,
    )
)
model_wrapper_cfg = dict(wrap_policy=dict(_delete_=True, type='FrozenWholePolicy', max_params=1_000_000))
