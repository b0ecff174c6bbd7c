# A decoder of the sizes of Llama 3 8B, from scratch, under ZeRO-3 in bfloat16: the plan, or a base for your own data.
_base_ = './_base_/zero3.py'

default_scope = 'mmengine'
model = dict(
    type='HuggingFaceCausalLM',
    config=dict(
        model_type='llama',
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters=dict(rope_type='default', rope_theta=500000.0),
    ),
)
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1),
    clip_grad=dict(max_norm=1.0),
    dtype='bfloat16',
)
