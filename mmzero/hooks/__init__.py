"""Hooks that ZeroRunner adds to every run."""

from mmzero.hooks.before import put_before
from mmzero.hooks.checkpoint import ZeroCheckpointHook, keeping_the_last, note_last
from mmzero.hooks.ema import ShardedEMA, over_shards
from mmzero.hooks.host_memory import HostMemoryHook
from mmzero.hooks.mean_teacher import ShardedMeanTeacher, teach_over_shards
from mmzero.hooks.preemption import PreemptionHook
from mmzero.hooks.random_state import RandomStateHook
from mmzero.hooks.sync_norm import average_statistics, is_sync_norm

__all__ = [
    'HostMemoryHook',
    'PreemptionHook',
    'RandomStateHook',
    'ShardedEMA',
    'ShardedMeanTeacher',
    'ZeroCheckpointHook',
    'average_statistics',
    'is_sync_norm',
    'keeping_the_last',
    'note_last',
    'over_shards',
    'put_before',
    'teach_over_shards',
]
