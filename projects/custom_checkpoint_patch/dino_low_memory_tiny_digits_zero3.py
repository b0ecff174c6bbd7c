# The digits with a backbone of this project, whose blocks mmzero recomputes because of their own option.
_base_ = ['../../configs/dino_swin_tiny_digits_zero3.py']

custom_imports = dict(imports=['projects.custom_checkpoint_patch.memory_patch'])
model_wrapper_cfg = dict(wrap_policy=dict(_delete_=True, type='AutoPolicy'))
model = dict(backbone=dict(_delete_=True, type='LowMemoryBackbone', channels=64, low_memory=True))
