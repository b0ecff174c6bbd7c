"""The model-zoo sweep: configs of OpenMMLab packages under the pair, beside the plain model and stock DDP."""

from mmzero.analysis.sweep.families import families
from mmzero.analysis.sweep.ranks import Limits
from mmzero.analysis.sweep.reduction import SIZES
from mmzero.analysis.sweep.results import Results, summary, table
from mmzero.analysis.sweep.run import sweep
from mmzero.analysis.sweep.verdict import FAILED, FAILS_PLAINLY, FAILS_UNDER_DDP, PASSED, TOO_LARGE, Verdict

__all__ = [
    'FAILED',
    'FAILS_PLAINLY',
    'FAILS_UNDER_DDP',
    'PASSED',
    'SIZES',
    'TOO_LARGE',
    'Limits',
    'Results',
    'Verdict',
    'families',
    'summary',
    'sweep',
    'table',
]
