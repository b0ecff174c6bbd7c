"""Values that are of the right type and mean nothing: what MMEngine or torch would take, or refuse only later."""

from collections.abc import Callable, Mapping
from typing import Any

from mmengine.hooks import EMAHook, Hook
from mmengine.registry import HOOKS, MODELS, DefaultScope
from torch import nn

from mmzero.config import Faults
from mmzero.config.reader import is_number
from mmzero.runner.loader_check import Rule, check_loader
from mmzero.runner.optim_check import USER_ERRORS
from mmzero.runner.translate import type_name


def _is_whole(value: Any) -> bool:
    return is_number(value) and float(value).is_integer()


def _int_from(low: int) -> Rule:
    return lambda value: _is_whole(value) and value >= low, f'expected an integer of {low} or more'


def _interval(value: Any) -> bool:
    return _is_whole(value) and (value >= 1 or value == -1)


AT_LEAST_0, AT_LEAST_1 = _int_from(0), _int_from(1)
INTERVAL: Rule = (_interval, 'expected an integer of 1 or more, or -1 for never')
SEED: Rule = (
    lambda value: _is_whole(value) and 0 <= value < 2**32,
    'expected an integer of 0 to 2**32 - 1',
)
ABOVE_0: Rule = (lambda value: is_number(value) and value > 0, 'expected a number above 0')

# The config path of a dict to the rules of its fields; * is any default hook.
RULES: dict[str, dict[str, Rule]] = {
    'train_cfg': dict(max_epochs=AT_LEAST_1, max_iters=AT_LEAST_1, val_interval=AT_LEAST_1, val_begin=AT_LEAST_0),
    'randomness': dict(seed=SEED),
    'env_cfg': dict(resource_limit=AT_LEAST_1),
    'env_cfg.dist_cfg': dict(timeout=ABOVE_0, port=AT_LEAST_1),
    'env_cfg.mp_cfg': dict(opencv_num_threads=_int_from(-1)),
    'log_processor': dict(window_size=AT_LEAST_1, num_digits=AT_LEAST_0),
    'auto_scale_lr': dict(base_batch_size=AT_LEAST_1),
    'default_hooks.logger': dict(interval=AT_LEAST_1),
    'default_hooks.checkpoint': dict(interval=INTERVAL, max_keep_ckpts=INTERVAL, save_begin=AT_LEAST_0),
    'default_hooks.visualization': dict(interval=AT_LEAST_1),
}
CHOICES: dict[str, dict[str, tuple]] = {
    'env_cfg.mp_cfg': dict(mp_start_method=('fork', 'spawn', 'forkserver')),
    'env_cfg.dist_cfg': dict(backend=('nccl', 'gloo', 'mpi', 'hccl', 'cncl', 'mccl', None), init_backend=('torch',)),
}


def check_values(cfg: Mapping, faults: Faults) -> None:
    """Check values by rules, and by building what is cheap to build.

    Args:
        cfg (Mapping): Arguments of the runner and keys of the config.
        faults (Faults): Takes what is wrong. Where a field has a fault already, nothing is added.
    """
    for path, rules in RULES.items():
        for field, (allowed, wanted) in rules.items():
            _check(_at(cfg, path), path, field, allowed, wanted, faults)
    for path, choices in CHOICES.items():
        for field, values in choices.items():
            wanted = 'allowed: ' + ', '.join(repr(value) for value in values if value is not None)
            _check(_at(cfg, path), path, field, lambda value, values=values: value in values, wanted, faults)
    for split in ('train', 'val', 'test'):
        check_loader(cfg.get(f'{split}_dataloader'), f'{split}_dataloader', faults)
    _try_hooks(cfg, faults)


def _at(cfg: Any, path: str) -> Any:
    for name in path.split('.'):
        cfg = cfg.get(name) if isinstance(cfg, Mapping) else None
    return cfg


def _check(cfg: Any, path: str, field: str, allowed: Callable, wanted: str, faults: Faults) -> None:
    where = f'{path}.{field}'
    if isinstance(cfg, Mapping) and cfg.get(field) is not None and not faults.at(where) and not allowed(cfg[field]):
        faults.add(where, f'got {cfg[field]!r}; {wanted}')


def _try_hooks(cfg: Mapping, faults: Faults) -> None:
    """Build MMEngine's own hooks, whose constructors only keep what they are given."""
    default, custom = cfg.get('default_hooks') or {}, cfg.get('custom_hooks') or []
    named = {f'default_hooks.{name}': hook for name, hook in default.items()}
    named.update({f'custom_hooks[{index}]': hook for index, hook in enumerate(custom)})
    for path, hook in named.items():
        if not isinstance(hook, Mapping) or faults.at(path):
            continue
        with DefaultScope.overwrite_default_scope(cfg.get('default_scope') or 'mmengine'):
            cls = HOOKS.get(hook['type']) if isinstance(hook['type'], str) else hook['type']
        if not _is_light(cls):
            continue
        try:
            built = cls(**{key: value for key, value in hook.items() if key not in ('type', 'priority', '_scope_')})
            if isinstance(built, EMAHook):
                with DefaultScope.overwrite_default_scope(cfg.get('default_scope') or 'mmengine'):
                    MODELS.build(dict(built.ema_cfg), default_args=dict(model=nn.Linear(1, 1)))
        except USER_ERRORS as error:
            faults.add(path, f'{type_name(hook["type"])} refuses its arguments: {error}')


HEAVY = ('ProfilerHook', 'NPUProfilerHook')


def _is_light(cls: Any) -> bool:
    light = isinstance(cls, type) and issubclass(cls, Hook) and cls.__module__.startswith('mmengine.hooks')
    return light and cls.__name__ not in HEAVY
