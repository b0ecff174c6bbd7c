"""Existing config keys into mmzero's: honoured, translated, or refused by name."""

from collections.abc import Mapping
from typing import Any

import torch

from mmzero.config import Faults, engine_options, optim_fields_of
from mmzero.config.reader import optional_dtype
from mmzero.errors import near_names
from mmzero.runner.several import check_each, is_several, optimizers_of

OPTIM_WRAPPERS = ('OptimWrapper', 'AmpOptimWrapper', 'ZeroOptimWrapper')
OPTIM_FIELDS = (
    'type',
    'optimizer',
    'constructor',
    'paramwise_cfg',
    'accumulative_counts',
    'clip_grad',
    'dtype',
    'loss_scale',
    'max_skips',
    'grad_norms',
    'use_fsdp',
)

# Top-level keys of MMEngine that ZeroRunner cannot honour, with what to do.
REFUSED = {
    'strategy': 'belongs to FlexibleRunner; its settings go into model_wrapper_cfg, by tools/migrate_config.py',
}

ALIASES = ('activation_checkpointing', 'compile')
"""Top-level keys of MMEngine that are other names of fields of ``model_wrapper_cfg``."""


def type_name(value: Any) -> str:
    """Name the class that a ``type`` field means.

    Args:
        value (str or type): A name with or without scope, or the class itself.

    Returns:
        str: The bare class name.
    """
    return value.rsplit('.', 1)[-1] if isinstance(value, str) else getattr(value, '__name__', repr(value))


def is_amp(cfg: Any) -> bool:
    """Say whether a config asks for MMEngine's mixed precision.

    Args:
        cfg (dict or OptimWrapper, optional): ``optim_wrapper``.

    Returns:
        bool: Whether it does.
    """
    return isinstance(cfg, dict) and type_name(cfg.get('type', '')) == 'AmpOptimWrapper'


def becomes_bfloat16(cfg: Any) -> bool:
    """Say whether MMEngine's mixed precision is asked for without a dtype, which is bfloat16 here.

    Args:
        cfg (dict or OptimWrapper, optional): ``optim_wrapper``.

    Returns:
        bool: Whether it is, for one of several optimizers at least.
    """
    return any(is_amp(one) and one.get('dtype') is None for one in [cfg, *optimizers_of(cfg).values()])


def translate_optim_wrapper(cfg: Any, faults: Faults) -> Any:
    """Turn MMEngine's optimizer wrappers into ZeroOptimWrapper.

    Args:
        cfg (dict or OptimWrapper, optional): ``optim_wrapper``; not changed.
        faults (Faults): Takes what cannot be translated.

    Returns:
        dict or OptimWrapper, optional: The translation.
    """
    if not isinstance(cfg, dict):
        # Plain values of a wrong kind are named with the other top-level keys.
        if cfg is not None and not isinstance(cfg, (str, int, float, list, tuple)):
            faults.add('optim_wrapper', 'was built before the model is sharded; give its config, a dict')
        return cfg
    if is_several(cfg):
        return _translate_several(cfg, faults)
    cfg = cfg.copy()
    # Left by bases of another package, to find its classes; ours are in the root registries.
    scope = cfg.pop('_scope_', None)
    name = type_name(cfg.get('type', 'OptimWrapper'))
    if name not in OPTIM_WRAPPERS:
        faults.add('optim_wrapper.type', f'{name!r} is not supported; allowed: {", ".join(OPTIM_WRAPPERS)}')
        return cfg
    if 'optimizer' not in cfg:
        faults.add(
            'optim_wrapper.optimizer',
            "is missing; give it, such as dict(type='AdamW', lr=1e-4), or several, each a dict with optimizer under "
            'the name of the child that it trains',
        )
        return cfg
    for field in cfg:
        if field not in OPTIM_FIELDS:
            faults.add(f'optim_wrapper.{field}', f'unknown field{near_names(str(field), OPTIM_FIELDS)}')
    if name == 'AmpOptimWrapper' and cfg.get('dtype') is None:
        cfg['dtype'] = 'bfloat16'
    if not _is_float16(cfg.get('dtype')):
        _drop_loss_scale(cfg, faults)
    cfg.pop('use_fsdp', None)
    cfg['type'] = 'ZeroOptimWrapper'
    return cfg if scope is None else type(cfg)(cfg, _scope_=scope)


def with_engine_options(cfg: Any, wrapper: Any) -> Any:
    """Take fields of the optimizer wrapper that the engine's own options have, where the config is silent.

    Args:
        cfg (dict or OptimWrapper, optional): ``optim_wrapper``; not changed.
        wrapper (dict, optional): ``model_wrapper_cfg``.

    Returns:
        dict or OptimWrapper, optional: The same with these fields.
    """
    if not isinstance(cfg, dict) or not isinstance(wrapper, Mapping) or is_several(cfg):
        return cfg
    try:
        options = engine_options(wrapper.get('engine_options'))
    except ValueError:
        return cfg  # named with the other fields of model_wrapper_cfg
    found = {name: value for name, value in optim_fields_of(options or {}).items() if cfg.get(name) is None}
    if 'loss_scale' in found and cfg.get('dtype') not in (None, 'float16'):
        del found['loss_scale']
    return type(cfg)({**cfg, **found}) if found else cfg


def _translate_several(cfg: Any, faults: Faults) -> Any:
    """Each by itself. What else there is belongs to the constructor."""
    built = [name for name, one in optimizers_of(cfg).items() if not isinstance(one, Mapping)]
    for name in built:
        faults.add(f'optim_wrapper.{name}', 'was built before the model is sharded; give its config, a dict')
    rest = [name for name in cfg if name not in optimizers_of(cfg) and name not in ('constructor', '_scope_', 'type')]
    if cfg.get('constructor') is None:
        for name in rest:
            why = 'unknown field' if name in OPTIM_FIELDS else 'is no optimizer wrapper: it has no optimizer'
            faults.add(f'optim_wrapper.{name}', f'{why}; beside several optimizers, each has its own fields')
        if is_amp(cfg):
            faults.add('optim_wrapper.type', "got 'AmpOptimWrapper' beside several optimizers; give it to each of them")
    translated = check_each(cfg, faults, lambda _, one, own: translate_optim_wrapper(one, own))
    return type(cfg)({**cfg, **{name: one for name, one in translated.items() if name not in built}})


def _dtype_of(cfg: Any) -> Any:
    return cfg.get('dtype') if isinstance(cfg, Mapping) else None


def _is_float16(value: Any) -> bool:
    return _is_dtype(value) and optional_dtype(value) == torch.float16


def _drop_loss_scale(cfg: dict, faults: Faults) -> None:
    scale = cfg.pop('loss_scale', None)
    if isinstance(scale, (int, float)) and not isinstance(scale, bool):
        faults.add(
            'optim_wrapper.loss_scale',
            f'got {scale}; a fixed scale is for float16, and this is {cfg.get("dtype") or "float32"}; remove it, or '
            "set dtype='float16'",
        )


def wrapper_fields(cfg: dict, optim_wrapper: Any) -> dict:
    """Collect the wrapper's fields from where MMEngine configs keep them.

    Args:
        cfg (dict): The whole config; not changed.
        optim_wrapper (dict, optional): The translated optimizer wrapper.

    Returns:
        dict: Fields of ``model_wrapper_cfg`` with the top-level ``find_unused_parameters``, ``compile`` and
        ``activation_checkpointing``, and the optimizer wrapper's dtype as ``precision.param_dtype``.
    """
    given = cfg.get('model_wrapper_cfg')
    fields = dict(given) if isinstance(given, Mapping) else {}
    for name in ('type', '_scope_'):
        fields.pop(name, None)
    for name in ('find_unused_parameters', *ALIASES):
        if _is_asked(cfg.get(name)):
            fields.setdefault(name, cfg[name])
    dtype = _dtype_of(optim_wrapper)
    if is_several(optim_wrapper):
        dtypes = {name: _dtype_of(one) for name, one in optimizers_of(optim_wrapper).items()}
        same = len({str(value) for value in dtypes.values()}) == 1
        dtype = next(iter(dtypes.values())) if same else None
        # The model's own step calls its children; it says so where it calls itself.
        fields.setdefault('separate', True if same or not dtypes else dtypes)
    precision = fields.get('precision')
    if dtype is not None and _is_dtype(dtype) and isinstance(precision or {}, dict):
        fields['precision'] = {'param_dtype': dtype, **(precision or {})}
    return fields


def path_of(cfg: dict, name: str) -> str:
    """Say where a config has one of :data:`ALIASES`.

    Args:
        cfg (dict): The whole config.
        name (str): The key.

    Returns:
        str: Its config path.
    """
    wrapper = cfg.get('model_wrapper_cfg')
    is_inside = isinstance(wrapper, Mapping) and name in wrapper
    return name if _is_asked(cfg.get(name)) and not is_inside else f'model_wrapper_cfg.{name}'


def _differ(outside: Any, inside: Any) -> bool:
    """Whether a key says something else than the field that it is another name of; None says nothing."""
    if outside is None or (not _is_asked(outside) and not _is_asked(inside)):
        return False
    return outside != inside


def _is_asked(value: Any) -> bool:
    """Whether a key asks for something; ``compile={}`` does, as under MMEngine's Runner."""
    return bool(value) or isinstance(value, Mapping)


def _is_dtype(value: Any) -> bool:
    """Whether it is one; what is none is named where it stands, as ``optim_wrapper.dtype``."""
    try:
        return optional_dtype(value) is not None
    except (TypeError, ValueError):
        return False


def refuse_keys(cfg: dict, faults: Faults) -> None:
    """Refuse the keys and hooks that would be ignored or break.

    Args:
        cfg (dict): The whole config.
        faults (Faults): Takes them.
    """
    for name, reason in REFUSED.items():
        if cfg.get(name):
            faults.add(name, reason)
    wrapper = cfg.get('model_wrapper_cfg')
    for name in ALIASES:
        if isinstance(wrapper, Mapping) and name in wrapper and _differ(cfg.get(name), wrapper[name]):
            why = f'is not what model_wrapper_cfg.{name} says, which it is another name of; give one of them'
            faults.add(name, why)
    if wrapper is None:
        faults.add('model_wrapper_cfg', "is missing; add model_wrapper_cfg = dict(type='ZeroModelWrapper', stage=3)")
    elif type_name(wrapper.get('type', 'ZeroModelWrapper')) != 'ZeroModelWrapper':
        own = '; its children are sharded by themselves where optim_wrapper has several optimizers'
        migrates = '; tools/migrate_config.py makes such a config of this one'
        more = dict(MMSeparateDistributedDataParallel=own, MMFullyShardedDataParallel=migrates).get(
            type_name(wrapper['type']), ''
        )
        faults.add('model_wrapper_cfg.type', f"got {wrapper['type']!r}; ZeroRunner needs 'ZeroModelWrapper'{more}")
