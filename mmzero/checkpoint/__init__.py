"""Checkpoints, without pickled objects: one full ``.pth`` in the OpenMMLab layout, or a folder of shards."""

from mmzero.checkpoint.load import fitting_shards, fitting_state, load_extra_states, load_into_real
from mmzero.checkpoint.names import clean_name, clean_names, fitting_names, is_extra_state, matching_names
from mmzero.checkpoint.plain import message_hub_state, plain
from mmzero.checkpoint.pretrained import nothing_loaded, pretrained_loading
from mmzero.checkpoint.random_state import gather_random_states, random_state, set_random_state
from mmzero.checkpoint.read import placeholders, read_checkpoint, read_meta, safe_loading
from mmzero.checkpoint.sharded import (
    BackgroundSave,
    SavedTensor,
    check_files,
    contents_of,
    is_sharded,
    load_rest,
    load_saved,
    newest_complete,
    optimizer_prefix,
    read_alone,
    save_sharded,
    split,
    state_of,
    to_load,
)
from mmzero.checkpoint.shared import check_seen, check_shared, check_writable, each_reads, made_in
from mmzero.checkpoint.write import write_checkpoint

__all__ = [
    'BackgroundSave',
    'SavedTensor',
    'check_files',
    'check_seen',
    'check_shared',
    'check_writable',
    'clean_name',
    'clean_names',
    'contents_of',
    'each_reads',
    'fitting_names',
    'fitting_shards',
    'fitting_state',
    'gather_random_states',
    'is_extra_state',
    'is_sharded',
    'load_extra_states',
    'load_into_real',
    'load_rest',
    'load_saved',
    'read_alone',
    'made_in',
    'matching_names',
    'message_hub_state',
    'newest_complete',
    'nothing_loaded',
    'optimizer_prefix',
    'placeholders',
    'plain',
    'pretrained_loading',
    'random_state',
    'read_checkpoint',
    'read_meta',
    'safe_loading',
    'save_sharded',
    'set_random_state',
    'split',
    'state_of',
    'to_load',
    'write_checkpoint',
]
