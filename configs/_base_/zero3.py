runner_type = 'mmzero.ZeroRunner'
model_wrapper_cfg = dict(type='ZeroModelWrapper', stage=3)
