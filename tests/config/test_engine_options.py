"""DeepSpeed's own config as a field: how it is read, and what of it mmzero's fields say too."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mmzero.config import Faults, ZeroConfig, optim_fields_of, read_zero_config, without_auto


def read(**fields: Any) -> tuple[ZeroConfig, list[str]]:
    faults = Faults()
    return read_zero_config(dict(engine='deepspeed', **fields), 'model_wrapper_cfg', faults), faults.lines


ZERO = dict(
    stage=2,
    offload_optimizer=dict(device='cpu', pin_memory=False),
    offload_param=dict(device='none'),
    overlap_comm=True,
)


def test_a_file_fills_what_the_config_is_silent_about(tmp_path: Path) -> None:
    path = tmp_path / 'ds_config.json'
    path.write_text(json.dumps(dict(zero_optimization=ZERO, bf16=dict(enabled=True), communication_data_type='bf16')))
    config, faults = read(engine_options=str(path))
    assert not faults
    assert (config.stage, config.offload.optimizer, config.offload.params) == (2, 'cpu', None)
    assert (config.precision.param_dtype, config.precision.reduce_dtype) == (torch.bfloat16, torch.bfloat16)
    assert config.engine_options == json.loads(path.read_text())


def test_the_same_twice_is_fine_and_auto_says_nothing() -> None:
    options = dict(zero_optimization=dict(stage=3), bf16=dict(enabled='auto'), gradient_clipping='auto')
    config, faults = read(stage=3, precision=dict(param_dtype='float16'), engine_options=options)
    assert not faults and config.precision.param_dtype == torch.float16
    assert without_auto(options) == dict(zero_optimization=dict(stage=3), bf16={})


@pytest.mark.parametrize(
    ('fields', 'wanted'),
    [
        (dict(stage=3), 'zero_optimization.stage: got 2, and model_wrapper_cfg.stage is 3'),
        (
            dict(offload=dict(optimizer='nvme', nvme_path='/x'), stage=2),
            "offload_optimizer.device: got 'cpu', and model_wrapper_cfg.offload.optimizer is 'nvme'",
        ),
        (
            dict(precision=dict(param_dtype='float16')),
            "bf16.enabled: got 'bfloat16', and model_wrapper_cfg.precision.param_dtype is 'float16'",
        ),
    ],
)
def test_what_is_given_twice_and_differs(fields: dict, wanted: str) -> None:
    _, faults = read(engine_options=dict(zero_optimization=ZERO, bf16=dict(enabled=True)), **fields)
    assert any(wanted in line for line in faults), faults


@pytest.mark.parametrize(
    ('text', 'wanted'),
    [
        (None, 'no file can be read there'),
        ('{"a": [1}', 'no JSON: line 1'),
        ('[]', 'the file holds a list'),
        ('{"bf16": {"enabled": true, "enabled": false}}', "'enabled' is given twice"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str | None, wanted: str) -> None:
    path = tmp_path / 'ds_config.json'
    if text is not None:
        path.write_text(text)
    _, faults = read(engine_options=str(path))
    assert len(faults) == 1 and wanted in faults[0] and faults[0].startswith('model_wrapper_cfg.engine_options: ')


def test_comments_as_deepspeed_reads_them(tmp_path: Path) -> None:
    pytest.importorskip('hjson')
    path = tmp_path / 'ds_config.json'
    path.write_text('{\n  // two\n  "zero_optimization": {"stage": 2},\n}')
    assert read(engine_options=str(path))[0].stage == 2
    path.write_text('{\n  // two\n  "zero_optimization": {"stage": 2, "stage": 3},\n}')
    assert "'stage' is given twice" in read(engine_options=str(path))[1][0]


def test_other_engines_and_ddp_take_none() -> None:
    _, faults = read(stage=0, engine_options=dict(gradient_clipping=1.0))
    assert faults == [
        "model_wrapper_cfg.engine_options: is DeepSpeed's config, and stage=0 is DDP under every engine; remove it, or "
        'use stage 1, 2 or 3'
    ]
    own = Faults()
    read_zero_config(dict(engine_options=dict(gradient_clipping=1.0)), 'model_wrapper_cfg', own)
    assert own.lines and "the engine is 'fsdp2'" in own.lines[0]


def test_nvme_needs_a_folder_and_stage_3() -> None:
    assert 'nvme_path: is missing' in read(offload=dict(params='nvme'))[1][0]
    assert 'needs stage=3' in read(stage=2, offload=dict(optimizer='nvme', nvme_path='/x'))[1][0]
    assert read(offload=dict(params='nvme', nvme_path='/x'))[1] == []


def test_fields_of_the_optimizer_wrapper() -> None:
    options = dict(gradient_clipping=0.5, gradient_accumulation_steps=4, fp16=dict(enabled=True, loss_scale=128))
    wanted = dict(clip_grad=dict(max_norm=0.5), accumulative_counts=4, dtype='float16', loss_scale=128)
    assert optim_fields_of(options) == wanted
    assert optim_fields_of(dict(gradient_clipping=0, gradient_accumulation_steps=1, bf16=dict(enabled='auto'))) == {}
