# A list: what any of its policies makes a unit. Here the blocks, and the largest layer outside of them.
_base_ = ['../_base_/dino_swin_tiny_digits.py', '../_base_/zero3.py']

model_wrapper_cfg = dict(
    wrap_policy=['AutoPolicy', dict(type='ModuleNamePolicy', names=['memory_trans_fc'])],
)
