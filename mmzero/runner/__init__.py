"""What MMEngine's tools call: ZeroRunner, which puts the steps of a sharded run into the right order."""

from mmzero.runner.launch import run_tool
from mmzero.runner.options import (
    build_runner,
    config_of,
    enable_amp,
    enable_auto_scale_lr,
    enable_tta,
    load_config,
    tool_parser,
)
from mmzero.runner.plan_config import PlannedConfig, plan_configs, prepare_plan
from mmzero.runner.zero_runner import ZeroRunner

__all__ = [
    'PlannedConfig',
    'ZeroRunner',
    'build_runner',
    'config_of',
    'enable_amp',
    'enable_auto_scale_lr',
    'enable_tta',
    'load_config',
    'plan_configs',
    'prepare_plan',
    'run_tool',
    'tool_parser',
]
