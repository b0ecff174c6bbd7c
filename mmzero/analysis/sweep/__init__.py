"""The model-zoo sweep: configs of OpenMMLab packages under the pair, beside the plain model and stock DDP."""

from mmzero.analysis.sweep.families import one_per_family
from mmzero.analysis.sweep.judge import FAILED, FAILS_PLAINLY, FAILS_UNDER_DDP, PASSED, Verdict
from mmzero.analysis.sweep.ranks import Limits
from mmzero.analysis.sweep.reduction import SIZES
from mmzero.analysis.sweep.results import Results, summary, table
from mmzero.analysis.sweep.run import sweep

__all__ = [
    'FAILED',
    'FAILS_PLAINLY',
    'FAILS_UNDER_DDP',
    'PASSED',
    'SIZES',
    'Limits',
    'Results',
    'Verdict',
    'one_per_family',
    'summary',
    'sweep',
    'table',
]
