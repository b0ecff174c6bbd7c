"""The pair that MMEngine trains with: one model wrapper, one optimizer wrapper, for all engines."""

from mmzero.wrappers.model import ZeroModelWrapper
from mmzero.wrappers.optim import ZeroOptimWrapper

__all__ = ['ZeroModelWrapper', 'ZeroOptimWrapper']
