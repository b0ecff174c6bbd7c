"""Checkpoints: one full ``.pth`` in the OpenMMLab layout, written and read without pickled objects."""

from mmzero.checkpoint.load import fitting_state, load_into_real
from mmzero.checkpoint.names import clean_name, clean_names, fitting_names, matching_names
from mmzero.checkpoint.plain import message_hub_state, plain
from mmzero.checkpoint.pretrained import nothing_loaded, pretrained_loading
from mmzero.checkpoint.random_state import gather_random_states, random_state, set_random_state
from mmzero.checkpoint.read import placeholders, read_checkpoint, safe_loading
from mmzero.checkpoint.write import write_checkpoint

__all__ = [
    'clean_name',
    'clean_names',
    'fitting_names',
    'fitting_state',
    'gather_random_states',
    'load_into_real',
    'matching_names',
    'message_hub_state',
    'nothing_loaded',
    'placeholders',
    'plain',
    'pretrained_loading',
    'random_state',
    'read_checkpoint',
    'safe_loading',
    'set_random_state',
    'write_checkpoint',
]
