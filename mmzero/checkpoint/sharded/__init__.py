"""Sharded checkpoints: a folder that is complete or not there, its tensors in the format of torch's DCP."""

from mmzero.checkpoint.sharded.background import BackgroundSave
from mmzero.checkpoint.sharded.folder import FolderState, is_sharded, newest_complete, state_of
from mmzero.checkpoint.sharded.layout import optimizer_prefix, optimizers_in, split, to_load
from mmzero.checkpoint.sharded.load import (
    SavedTensor,
    check_files,
    contents_of,
    is_whole,
    load_rest,
    load_saved,
    load_tensors,
    read_alone,
    tensors_in,
)
from mmzero.checkpoint.sharded.save import save_sharded

__all__ = [
    'BackgroundSave',
    'FolderState',
    'SavedTensor',
    'check_files',
    'contents_of',
    'is_sharded',
    'is_whole',
    'load_rest',
    'load_saved',
    'read_alone',
    'load_tensors',
    'newest_complete',
    'optimizer_prefix',
    'optimizers_in',
    'save_sharded',
    'split',
    'state_of',
    'tensors_in',
    'to_load',
]
