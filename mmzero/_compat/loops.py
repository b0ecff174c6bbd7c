"""MMEngine's loops."""

# What takes batches for its loop by iterations. Remove once that has a public name, or can go on at a place itself.
from mmengine.runner.loops import _InfiniteDataloaderIterator as InfiniteIterator

__all__ = ['InfiniteIterator']
