"""Stages 1 to 3 on torch's FSDP2."""

from mmzero.engines.fsdp2.engine import FSDP2Engine

__all__ = ['FSDP2Engine']
