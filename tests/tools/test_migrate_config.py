"""Configs for MMEngine's FSDP and DeepSpeed, migrated by the tool, checked and trained on two ranks."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.config import Config

from mmzero.runner import build_runner, load_config
from mmzero.runner.migrate import check_migrated, config_text, migrate_config, write_config
from tests.distributed.ranks import run_ranks
from tests.tools.migrations import SOURCES, base, write_source
from tests.tools.processes import ROOT, run, succeed

TOOL = ROOT / 'tools/migrate_config.py'

# What the engine of each migrated config has to be: stage, dtype of units, where the loss scale began, steps of the
# optimizer, modules that are recomputed, whether it is offloaded.
WANTED: dict[str, dict[str, Any]] = {
    'fsdp, by size': dict(stage=3, dtype='bfloat16'),
    'fsdp, nothing said': dict(stage=3),
    'fsdp, full state in bfloat16': dict(stage=3, dtype='bfloat16'),
    'fsdp, layers and what is recomputed': dict(stage=3, regions=3),
    'fsdp, within nodes': dict(stage=3),
    'fsdp, gradients alone': dict(stage=2, steps=1),
    'fsdp, not sharded': dict(stage=0),
    'runner, offloaded': dict(stage=3, offloaded=True),
    'runner, ignored modules': dict(stage=3, dtype='float16', scale=2.0**16),
    'deepspeed, stage 1 in float16': dict(stage=1, dtype='float16', scale=2.0**15),
    'deepspeed, stage 3': dict(stage=3, dtype='float16', scale=2.0**15),
    'deepspeed, nothing sharded': dict(stage=0),
    'deepspeed, bfloat16': dict(stage=2, dtype='bfloat16'),
    'deepspeed, filled in': dict(stage=2, dtype='bfloat16', steps=1),
    'deepspeed, offloaded': dict(stage=2, offloaded=True),
    'deepspeed, a file': dict(stage=3, dtype='bfloat16'),
}


def migrated(folder: Path, name: str) -> Path:
    source, target = write_source(folder, name), folder / 'new' / f'{name}.py'
    made = migrate_config(load_config(str(source)), ranks_per_node=2)
    write_config(config_text(made.cfg, str(source), str(target)), str(target), made.cfg)
    return target


@pytest.mark.parametrize('name', SOURCES)
def test_the_check_finds_no_fault(tmp_path: Path, name: str) -> None:
    assert check_migrated(load_config(str(migrated(tmp_path, name))), 2) == []


def test_the_check_finds_faults_but_what_this_machine_lacks() -> None:
    cfg = dict(base(), runner_type='mmzero.ZeroRunner', model_wrapper_cfg=dict(type='ZeroModelWrapper', stage=5))
    cfg['load_from'] = 'not/here.pth'
    cfg['train_dataloader']['dataset'] = dict(type='tests.vectors.Vectors', size=8, ann_file='nowhere.json')
    faults = check_migrated(cfg)
    assert any(fault.startswith('model_wrapper_cfg.stage: got 5') for fault in faults)
    assert not [fault for fault in faults if 'no file at' in fault or fault.startswith('load_from')]


def train(files: list[str], folder: str) -> list[dict[str, Any]]:
    return [_train(Config.fromfile(file), f'{folder}/{index}') for index, file in enumerate(files)]


def _train(cfg: Config, work_dir: str) -> dict[str, Any]:
    cfg.launcher, cfg.work_dir, cfg.experiment_name = 'pytorch', work_dir, work_dir
    runner = build_runner(cfg)
    runner.train()
    engine, wrapper = runner.sharded.engine, runner.optim_wrapper
    losses = runner.message_hub.get_scalar('train/loss')._log_history.tolist()
    # Without one where float16 has overflowed, and steps were skipped.
    states = [int(torch.as_tensor(state['step'])) for state in wrapper.optimizer.state.values()]
    param_dtype = engine.config.precision.param_dtype
    asks = engine.config.activation_checkpointing.is_asked
    scaler = engine.scaler_state()
    return dict(
        stage=engine.config.stage,
        dtype=None if param_dtype is None else str(param_dtype).removeprefix('torch.'),
        offloaded=engine.config.offload.to_host,
        steps=max(states, default=0),
        losses=losses,
        scale=scaler.get('scale'),
        regions=sum('forward' in vars(module) for module in engine.model.modules()) * asks,
    )


@pytest.mark.distributed
@pytest.mark.slow
def test_all_train_two_iterations_on_two_ranks(tmp_path: Path) -> None:
    files = [str(migrated(tmp_path, name)) for name in SOURCES]
    _judge(run_ranks(2, train, files, str(tmp_path / 'work')), list(SOURCES))


@pytest.mark.distributed
def test_one_of_each_trains_two_iterations_on_two_ranks(tmp_path: Path) -> None:
    names = ['fsdp, by size', 'runner, offloaded', 'deepspeed, filled in']
    files = [str(migrated(tmp_path, name)) for name in names]
    _judge(run_ranks(2, train, files, str(tmp_path / 'work')), names)


def _judge(ranks: list[list[dict[str, Any]]], names: list[str]) -> None:
    for found in ranks:
        for name, one in zip(names, found, strict=True):
            assert len(one['losses']) == 2 and all(map(math.isfinite, one['losses'])), (name, one)
            wanted = dict(dict(dtype=None, offloaded=False, steps=2, regions=0, scale=None), **WANTED[name])
            if wanted['scale'] is not None:
                # It was halved at each step that overflowed, which was skipped.
                wanted['steps'] -= round(math.log2(wanted['scale'] / one['scale']))
                wanted['scale'] = one['scale']
            assert {key: one[key] for key in wanted} == wanted, name


def test_the_tool_writes_an_overlay_and_says_what_changed(tmp_path: Path) -> None:
    source, target = write_source(tmp_path, 'deepspeed, filled in'), tmp_path / 'deep/new.py'
    text = succeed(sys.executable, TOOL, source, target)
    written = target.read_text()
    assert "_base_ = ['../bases/base.py']" in written and 'strategy' not in written and len(written.splitlines()) < 12
    for line in (
        "runner_type = 'FlexibleRunner' -> runner_type = 'mmzero.ZeroRunner'",
        'strategy.gradient_accumulation_steps = 2 -> optim_wrapper.accumulative_counts = 2',
        'WITHOUT COUNTERPART:',
        'strategy.exclude_frozen_parameters = True: checkpoints hold all parameters',
        f'wrote {target}',
        "mmzero's check: no faults",
    ):
        assert line in text, text
    again = run(sys.executable, TOOL, source, target)
    assert again.returncode == 2 and f'{target}: exists' in again.stdout and 'Traceback' not in again.stdout


def test_the_tool_prints_a_whole_config_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    source = write_source(tmp_path, 'fsdp, nothing said')
    options = ('--full', '--cfg-options', 'optim_wrapper.optimizer.lrr=1')
    done = run(sys.executable, TOOL, source, *options)
    assert done.returncode == 2 and 'optim_wrapper.optimizer.lrr' in done.stdout.split('error:')[1]
    assert '_base_' not in done.stdout and 'train_dataloader = dict(' in done.stdout


def test_the_tool_refuses_colossalai_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / 'colossal.py'
    file.write_text("runner_type = 'FlexibleRunner'\nstrategy = dict(type='ColossalAIStrategy')\n")
    done = run(sys.executable, TOOL, file)
    assert done.returncode == 2 and 'Traceback' not in done.stdout
    assert "strategy.type: ColossalAIStrategy cannot be migrated: Gemini's chunks" in done.stdout


def test_the_tool_is_short() -> None:
    assert len(TOOL.read_text().splitlines()) <= 150


def test_the_migrated_config_is_data(tmp_path: Path) -> None:
    """No object is left that a file cannot hold."""
    for name in SOURCES:
        json.dumps(migrate_config(load_config(str(write_source(tmp_path, name))), ranks_per_node=2).cfg)
