"""Hooks that ZeroRunner adds to every run."""

from mmzero.hooks.ema import ShardedEMA, over_shards
from mmzero.hooks.host_memory import HostMemoryHook
from mmzero.hooks.mean_teacher import ShardedMeanTeacher, teach_over_shards
from mmzero.hooks.random_state import RandomStateHook

__all__ = ['HostMemoryHook', 'RandomStateHook', 'ShardedEMA', 'ShardedMeanTeacher', 'over_shards', 'teach_over_shards']
