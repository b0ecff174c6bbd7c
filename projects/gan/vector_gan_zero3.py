custom_imports = dict(imports=['projects.gan.vector_gan'])

runner_type = 'mmzero.ZeroRunner'
model_wrapper_cfg = dict(type='ZeroModelWrapper', stage=3)

model = dict(type='VectorGAN')
train_dataloader = dict(
    batch_size=32,
    num_workers=0,
    dataset=dict(type='Circle'),
    sampler=dict(type='DefaultSampler', shuffle=True),
    collate_fn=dict(type='default_collate'),
)
train_cfg = dict(by_epoch=True, max_epochs=2)
optim_wrapper = dict(
    generator=dict(optimizer=dict(type='Adam', lr=1e-3, betas=(0.5, 0.99)), clip_grad=dict(max_norm=1.0)),
    discriminator=dict(optimizer=dict(type='Adam', lr=2e-3, betas=(0.5, 0.99))),
)
param_scheduler = dict(generator=[dict(type='CosineAnnealingLR', T_max=2)], discriminator=[])
default_hooks = dict(logger=dict(type='LoggerHook', interval=4), checkpoint=dict(type='CheckpointHook', interval=1))
