"""From the ``wrap_policy`` field to a policy."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from mmzero.errors import near_names
from mmzero.policies.plan import WrapPlan, make_plan
from mmzero.registry import WRAP_POLICIES

Policy = Callable[[nn.Module], WrapPlan]


def build_policy(cfg: Any) -> Policy:
    """Build a wrap policy.

    Args:
        cfg (str or dict or callable, optional): A registered name, a dict with ``type``, or a callable from
            a model to a WrapPlan. None: the whole model is one unit.

    Returns:
        Callable[[nn.Module], WrapPlan]: The policy.

    Raises:
        ValueError: If the name is not registered or the arguments do not fit.
    """
    if cfg is None:
        return lambda model: make_plan(model, (), 'none (one unit)')
    if callable(cfg):
        return cfg
    if isinstance(cfg, str):
        cfg = dict(type=cfg)
    if not isinstance(cfg, Mapping) or 'type' not in cfg:
        raise ValueError("expected a policy's name, or a dict with type, such as dict(type='ModuleClassPolicy', ...)")
    cls = cfg['type'] if isinstance(cfg['type'], type) else WRAP_POLICIES.get(cfg['type'])
    if cls is None:
        raise ValueError(f'no wrap policy {cfg["type"]!r}{near_names(cfg["type"], WRAP_POLICIES.module_dict)}')
    fields = {key: value for key, value in cfg.items() if key != 'type'}
    _check_fields(cls, fields)
    try:
        return cls(**fields)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _check_fields(cls: type, fields: Mapping) -> None:
    params = inspect.signature(cls).parameters
    kinds = {param.kind for param in params.values()}
    unknown = [key for key in fields if key not in params]
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        hints = ' '.join(f'{key!r}{near_names(str(key), params)}' for key in unknown)
        raise ValueError(f'{cls.__name__} has no field {hints}')
    needed = [name for name, param in params.items() if param.default is param.empty and param.kind in _NAMED]
    missing = [name for name in needed if name not in fields]
    if missing:
        raise ValueError(f'{cls.__name__} needs {", ".join(missing)}; give a dict, {_example(cls, needed)}')


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _example(cls: type, needed: list[str]) -> str:
    values = {'classes': "['SwinBlock']"}
    fields = ', '.join(f'{name}={values.get(name, "...")}' for name in needed)
    return f'such as dict(type={cls.__name__!r}, {fields})'
