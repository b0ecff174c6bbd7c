"""A data loader's own fields: exact types and ranges, and what torch says to them together."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import DataLoader

from mmzero.config import Faults
from mmzero.config.reader import is_number
from mmzero.runner.optim_check import USER_ERRORS

# What Runner.build_dataloader makes itself, and what it takes out before torch's DataLoader gets the rest.
LOADER_PROVIDED = ('dataset', 'sampler')
LOADER_EXTRA = ('num_batch_per_epoch', 'disable_subprocess_warning')
# What is built from dicts of its own.
BUILT = (*LOADER_PROVIDED, 'batch_sampler', 'collate_fn', 'worker_init_fn')

Rule = tuple[Callable[[Any], bool], str]


def _int_from(low: int) -> Rule:
    # torch counts with it, which no float can do, not even a whole one.
    return lambda value: type(value) is int and value >= low, f'expected an int of {low} or more'


def _optional(rule: Rule) -> Rule:
    allowed, wanted = rule
    return lambda value: value is None or allowed(value), f'{wanted}, or None'


FLAG: Rule = (lambda value: isinstance(value, bool), 'allowed: True, False')
LOADER_FIELDS: dict[str, Rule] = {
    'batch_size': _optional(_int_from(1)),
    'num_workers': _int_from(0),
    'prefetch_factor': _optional(_int_from(1)),
    'timeout': (lambda value: is_number(value) and value >= 0, 'expected a number of 0 or more'),
    'pin_memory': FLAG,
    'persistent_workers': FLAG,
    'drop_last': FLAG,
    'num_batch_per_epoch': _optional(_int_from(1)),
    'disable_subprocess_warning': FLAG,
}


def check_loader(cfg: Any, path: str, faults: Faults) -> None:
    """Check a data loader's own fields, whatever else is wrong in it.

    Args:
        cfg (dict, optional): The data loader.
        path (str): Its config path.
        faults (Faults): Takes what is wrong.
    """
    if not isinstance(cfg, Mapping):
        return
    for field, (allowed, wanted) in LOADER_FIELDS.items():
        if field in cfg and not allowed(cfg[field]):
            faults.add(f'{path}.{field}', f'got {cfg[field]!r}; {wanted}')
    if 'batch_size' not in cfg and cfg.get('batch_sampler') is None:
        faults.add(f'{path}.batch_size', 'is missing')
    if is_number(cfg.get('timeout')) and cfg['timeout'] > 0 and cfg.get('num_workers', 0) == 0:
        faults.add(f'{path}.timeout', 'needs num_workers of 1 or more')
    own = {key: value for key, value in cfg.items() if key not in (*BUILT, *LOADER_EXTRA, '_scope_')}
    if not any(faults.at(f'{path}.{key}') for key in own):
        _try_loader(own, path, faults)


def _try_loader(settings: dict[str, Any], path: str, faults: Faults) -> None:
    """Build torch's DataLoader over one number; it starts no worker before it is iterated."""
    try:
        with warnings.catch_warnings(action='ignore'):
            DataLoader([0], **settings)  # type: ignore[arg-type]
    except USER_ERRORS as error:
        faults.add(path, f'torch refuses its settings: {error}')
