"""Whole trainings of a config in 16 bit, held against stock DDP in float32 with several seeds."""

from mmzero.analysis.curves.config import Curve, curve_config, planned
from mmzero.analysis.curves.judge import TAIL, Verdict, judge
from mmzero.analysis.curves.report import curves_table, draw_losses, write_curves
from mmzero.analysis.curves.run import Losses, train_all

__all__ = [
    'TAIL',
    'Curve',
    'Losses',
    'Verdict',
    'curve_config',
    'curves_table',
    'draw_losses',
    'judge',
    'planned',
    'train_all',
    'write_curves',
]
