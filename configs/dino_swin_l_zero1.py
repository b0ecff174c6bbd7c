# ZeRO-1: only optimizer state and master weights are sharded between steps.
_base_ = './dino_swin_l_zero3.py'

model_wrapper_cfg = dict(stage=1)
