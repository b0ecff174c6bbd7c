"""Values given twice: in a ds_config and in the run's own config. Without the package."""

from typing import Any

import pytest
import torch

from mmzero.config import LossScale, ZeroConfig
from mmzero.engines import Clip, Training
from mmzero.engines.deepspeed.agreement import check_training
from mmzero.errors import ConfigError

ADAMW = dict(type='AdamW', lr=1e-4, betas=(0.9, 0.999), weight_decay=0.05)
RUN = Training(2, Clip('norm', dict(max_norm=0.1)), torch.bfloat16, None, ADAMW, [], 4, 8)


def faults(options: dict[str, Any], training: Training = RUN) -> list[str]:
    try:
        check_training(training, ZeroConfig(engine='deepspeed', engine_options=options))
    except ConfigError as error:
        return [fault.removeprefix('model_wrapper_cfg.engine_options.') for fault in error.faults]
    return []


def test_what_says_the_same() -> None:
    assert faults({}) == []
    assert (
        faults(
            dict(
                train_batch_size=64,
                train_micro_batch_size_per_gpu=4,
                gradient_accumulation_steps=2,
                gradient_clipping=0.1,
                bf16=dict(enabled=True),
                fp16=dict(enabled=False),
                optimizer=dict(type='Adam', params=dict(lr='1e-4', betas=[0.9, 0.999], eps='auto', adam_w_mode=True)),
                scheduler=dict(type='WarmupLR', params=dict(warmup_num_steps='auto')),
            )
        )
        == []
    )


def test_hpz_divides_the_ranks() -> None:
    (fault,) = faults(dict(zero_optimization=dict(zero_hpz_partition_size=3)))
    assert fault.startswith('zero_optimization.zero_hpz_partition_size: got 3, which does not divide 8 ranks; give one')
    for size in (1, 2, 8, 16):
        assert faults(dict(zero_optimization=dict(zero_hpz_partition_size=size))) == []


def test_the_batch_that_circulates() -> None:
    """1536 = 1 x 1536 on 64 ranks."""
    (fault,) = faults(dict(train_batch_size=1536), Training(1536, batch_size=1, world_size=64))
    assert 'here 1 x 1536 x 64 = 98304' in fault and fault.endswith('would be 24')


@pytest.mark.parametrize(
    ('options', 'wanted'),
    [
        (dict(train_batch_size=65), 'No accumulation makes 65 of 4 on 8 rank(s): give a multiple of 32'),
        (dict(train_batch_size=32), 'would be 1'),
        (dict(train_micro_batch_size_per_gpu=2), 'got 2, and train_dataloader.batch_size is 4'),
        (dict(gradient_accumulation_steps=4), 'set accumulative_counts=4 there'),
        (dict(gradient_clipping=1.0), 'has clip_grad with max_norm=0.1; say clip_grad=dict(max_norm=1.0)'),
        (dict(gradient_clipping=0.0), 'say no clip_grad there'),
        (dict(bf16=dict(enabled=False)), 'bf16.enabled: got False, and optim_wrapper.dtype is bfloat16'),
        (
            dict(fp16=dict(enabled=True)),
            "optim_wrapper.dtype is bfloat16; set dtype='float16'",
        ),
        (
            dict(optimizer=dict(type='Adam', params=dict(adam_w_mode=False))),
            'which is Adam, and optim_wrapper',
        ),
        (dict(optimizer=dict(type='AdamW', params=dict(weight_decay=0.1))), 'say weight_decay=0.1 there'),
        (dict(optimizer=dict(type='AdamW', params=dict(bias_correction=True))), 'optim_wrapper.optimizer has none'),
        (dict(scheduler=dict(type='OneCycle', params=dict(cycle_min_lr=1e-5))), 'say it as param_scheduler'),
        (
            dict(scheduler=dict(type='WarmupCosineLR', params=dict(total_num_steps=100, warmup_num_steps=10))),
            "dict(type='CosineAnnealingLR', eta_min_ratio=0.0001, by_epoch=False, begin=10, end=100)",
        ),
    ],
)
def test_what_says_another_thing(options: dict[str, Any], wanted: str) -> None:
    (fault,) = faults(options)
    assert wanted in fault


def test_a_batch_of_unknown_size() -> None:
    run = Training(2, world_size=8)
    assert faults(dict(train_batch_size=64), run) == []
    assert 'give a multiple of 16' in faults(dict(train_batch_size=65), run)[0]


def test_loss_scales() -> None:
    fixed = Training(dtype=torch.float16, loss_scale=LossScale(static=128.0))
    assert faults(dict(fp16=dict(enabled=True, loss_scale=128)), fixed) == []
    assert 'fp16.loss_scale: got 64' in faults(dict(fp16=dict(enabled=True, loss_scale=64)), fixed)[0]
    dynamic = Training(dtype=torch.float16, loss_scale=LossScale(options=dict(init_scale=2.0**12)))
    assert faults(dict(fp16=dict(enabled=True, loss_scale=0, initial_scale_power=12)), dynamic) == []
    found = faults(dict(fp16=dict(enabled=True, loss_scale=0, initial_scale_power=16)), dynamic)
    assert 'fp16.initial_scale_power: got 16, and optim_wrapper.loss_scale makes it 12' in found[0]


def test_all_come_together() -> None:
    found = faults(dict(train_micro_batch_size_per_gpu=2, gradient_clipping=1.0, bf16=dict(enabled=False)))
    assert len(found) == 3
