# ZeRO-2: parameters stay gathered from forward to the last backward, gradients are sharded.
_base_ = './dino_swin_l_zero3.py'

model_wrapper_cfg = dict(stage=2)
