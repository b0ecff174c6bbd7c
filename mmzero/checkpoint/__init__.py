"""Checkpoints: one full ``.pth`` in the OpenMMLab layout, written and read without pickled objects."""

from mmzero.checkpoint.names import clean_names, matching_names
from mmzero.checkpoint.plain import message_hub_state, plain
from mmzero.checkpoint.random_state import gather_random_states, random_state, set_random_state
from mmzero.checkpoint.read import placeholders, read_checkpoint, safe_loading
from mmzero.checkpoint.write import write_checkpoint

__all__ = [
    'clean_names',
    'gather_random_states',
    'matching_names',
    'message_hub_state',
    'placeholders',
    'plain',
    'random_state',
    'read_checkpoint',
    'safe_loading',
    'set_random_state',
    'write_checkpoint',
]
