"""Reading files without unpickling anything else."""

import functools
import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import mmengine.runner.checkpoint
import numpy as np
import torch
import torch.utils.serialization.config


@contextmanager
def alone_in_checkpoint_io() -> Iterator[None]:
    """Let one rank read a checkpoint by itself.

    MMEngine's loaders of URLs wait for all ranks at a barrier, since there every rank reads. Remove once
    MMEngine has a loader without it.

    Yields:
        None: Inside, MMEngine's checkpoint loaders take this process for the only one.
    """
    module = mmengine.runner.checkpoint
    get_dist_info = module.get_dist_info
    module.get_dist_info = lambda group=None: (0, 1)
    try:
        yield
    finally:
        module.get_dist_info = get_dist_info


def mapped_files() -> AbstractContextManager:
    """Let ``torch.load`` inside, whoever calls it, map files into memory; it raises for what is no zip file.

    Remove once MMEngine's loaders pass ``mmap`` on.

    Returns:
        AbstractContextManager: To be entered.
    """
    config: Any = torch.utils.serialization.config
    return config.patch('load.mmap', True)


@functools.cache
def dcp_pickle_globals() -> dict[tuple[str, str], Any]:
    """What the ``.metadata`` of a DCP checkpoint may name: records of names, shapes, dtypes and places in files.

    Remove once torch reads it without unpickling.

    Returns:
        dict[tuple[str, str], Any]: Module and name to the class or function.
    """
    metadata, storage = 'torch.distributed.checkpoint.metadata', 'torch.distributed.checkpoint.filesystem'
    names = dict.fromkeys(
        (
            'BytesStorageMetadata',
            'ChunkStorageMetadata',
            'Metadata',
            'MetadataIndex',
            'StorageMeta',
            'TensorProperties',
            'TensorStorageMetadata',
            '_MEM_FORMAT_ENCODING',
        ),
        metadata,
    )
    names |= dict(_StorageInfo=storage, Size='torch', PosixPath='pathlib', WindowsPath='pathlib')
    names |= dict(get_layout='torch.serialization', _get_layout='torch.serialization')
    found = {}
    for name, module in names.items():
        value = getattr(importlib.import_module(module), name, None)
        if value is not None:
            found[module, name] = value
    dtypes = [name for name, value in vars(torch).items() if isinstance(value, torch.dtype)]
    return found | {('torch', name): getattr(torch, name) for name in dtypes}


def numpy_pickle_globals() -> tuple:
    """Functions and dtype classes by which numpy arrays and numbers are unpickled.

    They moved from ``numpy.core`` to ``numpy._core`` in numpy 2, and files name either. Remove once checkpoints
    of MMEngine hold no numpy objects.

    Returns:
        tuple: Entries for ``torch.serialization.safe_globals``.
    """
    multiarray = importlib.import_module(f'{"numpy._core" if hasattr(np, "_core") else "numpy.core"}.multiarray')
    found: list = []
    for name in ('_reconstruct', 'scalar'):
        for package in ('numpy._core', 'numpy.core'):
            found.append((getattr(multiarray, name), f'{package}.multiarray.{name}'))
    kinds = ('Float64', 'Float32', 'Int64', 'Int32', 'Bool')
    found += [getattr(np.dtypes, f'{kind}DType') for kind in kinds]
    return tuple(found)
