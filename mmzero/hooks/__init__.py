"""Hooks that ZeroRunner adds to every run."""

from mmzero.hooks.checkpoint import ZeroCheckpointHook, keeping_the_last
from mmzero.hooks.ema import ShardedEMA, over_shards
from mmzero.hooks.host_memory import HostMemoryHook
from mmzero.hooks.random_state import RandomStateHook

__all__ = [
    'HostMemoryHook',
    'RandomStateHook',
    'ShardedEMA',
    'ZeroCheckpointHook',
    'keeping_the_last',
    'over_shards',
]
