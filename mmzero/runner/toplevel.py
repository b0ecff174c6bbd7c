"""Top-level keys: their kinds, what is misspelt, and which of them need each other."""

import difflib
import inspect
import os
from collections.abc import Mapping
from typing import Any

from mmengine.runner import Runner

from mmzero.config import Faults

# What the runner reads from a config besides the arguments of Runner.
READ_KEYS = (
    'model_wrapper_cfg',
    'runner_type',
    'activation_checkpointing',
    'checkpoint',
    'compile',
    'efficient_conv_bn_eval',
    'find_unused_parameters',
    'sync_bn',
    'custom_imports',
    'tta_model',
    'tta_pipeline',
)
RUNNER_KEYS = tuple(name for name in inspect.signature(Runner).parameters if name != 'cfg')

# Users keep variables at the top level. A key this close to one that is read is no variable but a misspelling; of
# all configs of mmdet none has a key that comes as close.
NEAR = 0.9

_DICT, _DICT_OR_LIST = ('a dict', (Mapping,)), ('a dict or a list', (Mapping, list, tuple))
KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    'train_cfg': _DICT,
    'val_cfg': _DICT,
    'test_cfg': _DICT,
    'train_dataloader': _DICT,
    'val_dataloader': _DICT,
    'test_dataloader': _DICT,
    'val_evaluator': _DICT_OR_LIST,
    'test_evaluator': _DICT_OR_LIST,
    'param_scheduler': _DICT_OR_LIST,
    'optim_wrapper': _DICT,
    'auto_scale_lr': _DICT,
    'default_hooks': _DICT,
    'custom_hooks': ('a list', (list, tuple)),
    'env_cfg': _DICT,
    'randomness': _DICT,
    'visualizer': _DICT,
    'log_processor': _DICT,
    'data_preprocessor': _DICT,
    'model': _DICT,
    'model_wrapper_cfg': _DICT,
    'load_from': ('the path of a checkpoint', (str, os.PathLike)),
    'work_dir': ('a path', (str, os.PathLike)),
    'resume': ('True or False', (bool,)),
    'find_unused_parameters': ('True or False', (bool,)),
    'launcher': ('a name', (str,)),
    'default_scope': ('a name', (str,)),
    'experiment_name': ('a name', (str,)),
    'log_level': ('a name, such as INFO', (str, int)),
    'sync_bn': ("'torch' or 'mmcv'", (str,)),
}

TOGETHER = (
    ('train_dataloader', 'train_cfg', 'optim_wrapper'),
    ('val_dataloader', 'val_cfg', 'val_evaluator'),
    ('test_dataloader', 'test_cfg', 'test_evaluator'),
)


def check_top_level(cfg: Mapping, faults: Faults) -> set[str]:
    """Check the keys of a config themselves.

    Args:
        cfg (Mapping): Arguments of the runner and keys of the config.
        faults (Faults): Takes what is wrong.

    Returns:
        set[str]: Keys whose value is of a wrong kind, which is not worth to be looked into.
    """
    wrong = set()
    for name, (kind, types) in KINDS.items():
        value = cfg.get(name)
        # Objects that were built already are theirs who built them.
        plain = isinstance(value, (str, int, float, list, tuple, Mapping))
        if value is not None and plain and not (isinstance(value, types) and _is_plain(value, types)):
            faults.add(name, f'got {value!r}; expected {kind}')
            wrong.add(name)
    known = (*RUNNER_KEYS, *READ_KEYS)
    for key in cfg:
        near = near_key(key, known)
        if near:
            hint = f'did you mean {near!r}? If it is a variable, rename it'
            faults.add(str(key), f'is no key that a runner reads; {hint}')
    for names in TOGETHER:
        missing = [name for name in names if cfg.get(name) is None]
        if missing and len(missing) < len(names):
            there = ', '.join(name for name in names if name not in missing)
            for name in missing:
                faults.add(name, f'is missing, and {there} needs it; give all of them or none')
    if cfg.get('param_scheduler') is not None and cfg.get('optim_wrapper') is None:
        faults.add('optim_wrapper', 'is missing, and param_scheduler needs it')
    _check_values(cfg, wrong, faults)
    return wrong


def _is_plain(value: Any, types: tuple[type, ...]) -> bool:
    return not isinstance(value, bool) or bool in types


def near_key(key: Any, known: tuple[str, ...]) -> str | None:
    """Find the key that another one is a misspelling of.

    Args:
        key: A top-level key.
        known (tuple[str, ...]): Keys that are read.

    Returns:
        str or None: The key that was meant.
    """
    if not isinstance(key, str) or key in known:
        return None
    close = difflib.get_close_matches(key, known, n=1, cutoff=NEAR)
    return next((name for name in known if one_slip(key, name)), close[0] if close else None)


def one_slip(word: str, other: str) -> bool:
    """Say whether two words differ by one letter that is missing, added or another, or by two that are swapped.

    Args:
        word (str): One word.
        other (str): The other.

    Returns:
        bool: Whether they do; False for words that are equal.
    """
    short, long = sorted((word, other), key=len)
    start = next((i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    if len(long) == len(short) + 1:
        return short[start:] == long[start + 1 :]
    if len(long) != len(short) or word == other:
        return False
    swapped = short[:start] + short[start : start + 2][::-1] + short[start + 2 :]
    return short[start + 1 :] == long[start + 1 :] or swapped == long


LOG_LEVELS = ('CRITICAL', 'ERROR', 'WARNING', 'WARN', 'INFO', 'DEBUG', 'NOTSET', 'FATAL')


def _check_values(cfg: Mapping, wrong: set[str], faults: Faults) -> None:
    level = cfg.get('log_level')
    if isinstance(level, str) and level not in LOG_LEVELS:
        faults.add('log_level', f'got {level!r}; allowed: {", ".join(LOG_LEVELS[:-2])}')
    if 'sync_bn' not in wrong and cfg.get('sync_bn') not in (None, 'torch', 'mmcv'):
        faults.add('sync_bn', f"got {cfg['sync_bn']!r}; allowed: 'torch', 'mmcv'")
    work_dir = cfg.get('work_dir')
    if isinstance(work_dir, (str, os.PathLike)) and not _writable(os.path.abspath(work_dir)):
        faults.add('work_dir', f'{work_dir} cannot be written; name a folder that can be made')


def _writable(path: str) -> bool:
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)
