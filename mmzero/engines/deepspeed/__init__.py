"""Stages 1 to 3 on DeepSpeed. Importing this does not import the deepspeed package; building an engine does."""

from mmzero.engines.deepspeed.engine import DeepSpeedEngine

__all__ = ['DeepSpeedEngine']
