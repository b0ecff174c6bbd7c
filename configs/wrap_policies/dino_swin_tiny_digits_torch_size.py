# torch's own policy by its name, as configs for MMFullyShardedDataParallel give it.
_base_ = ['../_base_/dino_swin_tiny_digits.py', '../_base_/zero3.py']

model_wrapper_cfg = dict(
    auto_wrap_policy=dict(type='size_based_auto_wrap_policy', min_num_params=300_000),
)
