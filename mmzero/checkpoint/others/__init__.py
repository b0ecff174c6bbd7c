"""Checkpoints that other programs have made."""

from mmzero.checkpoint.others.folders import is_of_others, read_of_others
from mmzero.checkpoint.others.fsdp_local import refuse_a_part
from mmzero.checkpoint.others.keys import weights_in

__all__ = ['is_of_others', 'read_of_others', 'refuse_a_part', 'weights_in']
