"""``paramwise_cfg``: its fields, and whether its keys are names of the model."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mmengine.registry import OPTIMIZERS
from torch import nn

from mmzero.config import Faults
from mmzero.config.reader import is_number
from mmzero.errors import near_names
from mmzero.runner.lookup import mentioned
from mmzero.runner.signatures import signature_of

MULTIPLIERS = ('bias_lr_mult', 'bias_decay_mult', 'norm_decay_mult', 'dwconv_decay_mult', 'flat_decay_mult')
PARAMWISE_FIELDS = (*MULTIPLIERS, 'dcn_offset_lr_mult', 'bypass_duplicate', 'custom_keys')
DEFAULT_CONSTRUCTOR = 'DefaultOptimWrapperConstructor'

# A key this close to a part of a parameter's name is a misspelling of it.
NEAR = 0.85


def check_paramwise(cfg: Any, optimizer: Mapping, constructor: Callable | None, faults: Faults) -> None:
    """Check the fields of ``paramwise_cfg``.

    Args:
        cfg (dict, optional): ``optim_wrapper.paramwise_cfg``.
        optimizer (dict): ``optim_wrapper.optimizer``.
        constructor (Callable, optional): The class that reads it; None where there is none.
        faults (Faults): Takes what is wrong.
    """
    path = 'optim_wrapper.paramwise_cfg'
    if cfg is None or constructor is None:
        return
    if not isinstance(cfg, Mapping):
        faults.add(path, f'got {cfg!r}; expected None or a dict')
        return
    known = set(PARAMWISE_FIELDS)
    if getattr(constructor, '__name__', '') != DEFAULT_CONSTRUCTOR:
        # It reads fields of its own; their names are in its code.
        known |= mentioned(constructor)
    for field, value in cfg.items():
        if field not in known:
            faults.add(f'{path}.{field}', f'unknown field{near_names(str(field), PARAMWISE_FIELDS)}')
        elif field.endswith('_mult'):
            _check_multiplier(value, f'{path}.{field}', faults)
    if not isinstance(cfg.get('bypass_duplicate', False), bool):
        faults.add(f'{path}.bypass_duplicate', f'got {cfg["bypass_duplicate"]!r}; allowed: True, False')
    decays = [field for field in cfg if str(field).endswith('decay_mult')]
    if decays and optimizer.get('weight_decay') is None:
        faults.add(f'{path}.{decays[0]}', 'needs optim_wrapper.optimizer.weight_decay, which it multiplies')
    _check_custom_keys(cfg.get('custom_keys', {}), optimizer, f'{path}.custom_keys', faults)


def _check_multiplier(value: Any, path: str, faults: Faults) -> None:
    if not is_number(value) or not value >= 0:
        faults.add(path, f'got {value!r}; expected a number of 0 or more')


def _check_custom_keys(keys: Any, optimizer: Mapping, path: str, faults: Faults) -> None:
    if not isinstance(keys, Mapping):
        faults.add(path, f'got {keys!r}; expected a dict of parts of parameter names')
        return
    options = set(_group_options(optimizer))
    for key, settings in keys.items():
        where = f'{path}.{key}'
        if not isinstance(key, str) or not isinstance(settings, Mapping):
            faults.add(where, f'got {settings!r}; expected a dict, such as dict(lr_mult=0.1)')
            continue
        for field, value in settings.items():
            if field in ('lr_mult', 'decay_mult'):
                _check_multiplier(value, f'{where}.{field}', faults)
            elif field not in options:
                hint = near_names(str(field), ['lr_mult', 'decay_mult', *options])
                faults.add(f'{where}.{field}', f'unknown field{hint}')
        if 'decay_mult' in settings and optimizer.get('weight_decay') is None:
            faults.add(f'{where}.decay_mult', 'needs optim_wrapper.optimizer.weight_decay, which it multiplies')
        if 'lr_mult' in settings and optimizer.get('lr') is None:
            faults.add(f'{where}.lr_mult', 'needs optim_wrapper.optimizer.lr, which it multiplies')


def _group_options(optimizer: Mapping) -> list[str]:
    """What a group of parameters may have of its own: the optimizer's arguments."""
    cls = optimizer.get('type')
    found = OPTIMIZERS.get(cls) if isinstance(cls, str) else cls
    return list(signature_of(found).params) if callable(found) else []


def check_tied(cfg: Any, model: nn.Module, faults: Faults) -> None:
    """Refuse groups per parameter where two names share one, unless the config says that this is known.

    Args:
        cfg (dict, optional): ``optim_wrapper``.
        model (nn.Module): The model; its parameters may be on the meta device.
        faults (Faults): Takes the names of the tied parameters.
    """
    paramwise = cfg.get('paramwise_cfg') if isinstance(cfg, Mapping) else None
    other = isinstance(cfg, Mapping) and cfg.get('constructor', DEFAULT_CONSTRUCTOR) != DEFAULT_CONSTRUCTOR
    if other or not isinstance(paramwise, Mapping) or not paramwise or paramwise.get('bypass_duplicate'):
        return
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param.requires_grad:
            names.setdefault(id(param), []).append(name)
    tied = [' and '.join(group) for group in names.values() if len(group) > 1]
    if tied:
        path = 'optim_wrapper.paramwise_cfg.bypass_duplicate'
        faults.add(path, f'the model ties {tied[0]}, which would be in two groups; set bypass_duplicate=True')


def check_custom_keys_match(cfg: Any, model: nn.Module, faults: Faults) -> dict[str, str]:
    """Find ``custom_keys`` that are in no parameter's name.

    Args:
        cfg (dict, optional): ``optim_wrapper``.
        model (nn.Module): The model; its parameters may be on the meta device.
        faults (Faults): Takes keys that look like a misspelling.

    Returns:
        dict[str, str]: The other keys without a parameter, with the names nearest to them. Stock configs have such, for
        models that may or may not have a certain parameter.
    """
    paramwise = cfg.get('paramwise_cfg') if isinstance(cfg, Mapping) else None
    keys = paramwise.get('custom_keys') if isinstance(paramwise, Mapping) else None
    names = [name for name, _ in model.named_parameters()]
    # The constructor matches by `key in name`, with the name of a parameter of the model itself after a dot.
    unmatched = [key for key in (keys or ()) if isinstance(key, str) and not any(key in f'.{name}' for name in names)]
    words = set().union(*map(_parts, names))
    left = {}
    for key in unmatched:
        close = difflib.get_close_matches(key, words, n=3, cutoff=NEAR)
        if close:
            path = f'optim_wrapper.paramwise_cfg.custom_keys.{key}'
            faults.add(path, f'is in no name of a parameter{near_names(key, close)}')
        else:
            nearest = difflib.get_close_matches(key, words, n=3, cutoff=0.6)
            left[key] = near_names(key, nearest) if nearest else ''
    return left


def _parts(name: str) -> Iterable[str]:
    words = name.split('.')
    for start in range(len(words)):
        for end in range(start, len(words)):
            yield '.'.join(words[start : end + 1])
