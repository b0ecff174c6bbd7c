"""Engines shard, synchronise, clip and step; each stage's rules live in its engine, once."""

from mmzero.engines.agreed_stop import AgreedStop
from mmzero.engines.base import Engine
from mmzero.engines.build import build_engine, engine_class, this_device
from mmzero.engines.closure import NO_CLOSURE, needs_closure
from mmzero.engines.deepspeed.joined import joined_weights
from mmzero.engines.flat_shard import SHARDS, FlatShard, is_meta
from mmzero.engines.forecast import Forecast
from mmzero.engines.local_parts import LocalParts
from mmzero.engines.loops import Loop, failed
from mmzero.engines.meeting import meet, started
from mmzero.engines.options import Clip, StepOptions, StepOutcome, Training
from mmzero.engines.outside_tree import materialize_outside, modules_outside_of
from mmzero.engines.process_group import LAUNCHERS, init_process_group, is_on_first_node, world_size_of
from mmzero.engines.rank0 import from_rank0, on_rank0, together
from mmzero.engines.shard_state import by_name, by_number
from mmzero.engines.shares import engine_for
from mmzero.engines.units import plan_units
from mmzero.engines.whole_weights import accept_whole_tensors

__all__ = [
    'LAUNCHERS',
    'NO_CLOSURE',
    'SHARDS',
    'AgreedStop',
    'Clip',
    'Engine',
    'FlatShard',
    'Forecast',
    'LocalParts',
    'Loop',
    'StepOptions',
    'StepOutcome',
    'Training',
    'accept_whole_tensors',
    'build_engine',
    'by_name',
    'by_number',
    'engine_class',
    'engine_for',
    'failed',
    'from_rank0',
    'init_process_group',
    'is_meta',
    'is_on_first_node',
    'joined_weights',
    'materialize_outside',
    'meet',
    'modules_outside_of',
    'needs_closure',
    'on_rank0',
    'plan_units',
    'started',
    'this_device',
    'together',
    'world_size_of',
]
