"""From the ``wrap_policy`` field to a policy."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from mmengine.registry import FUNCTIONS
from torch import nn
from typing_extensions import override

from mmzero.errors import near_names
from mmzero.policies.combine import AnyOf, Combined, Not
from mmzero.policies.plan import WrapPlan
from mmzero.policies.policy import Choice, WrapPolicy
from mmzero.policies.torch_style import TorchStylePolicy, is_torch_policy
from mmzero.registry import WRAP_POLICIES


class OneUnit(WrapPolicy):
    """The whole model is one unit: ``wrap_policy=None``."""

    @override
    def choose(self, model: nn.Module) -> Choice:
        return Choice(())

    @override
    def __str__(self) -> str:
        return 'none (one unit)'


class _Planner(WrapPolicy):
    """A callable that returns a plan by itself."""

    def __init__(self, function: Any) -> None:
        self.function = function

    @override
    def choose(self, model: nn.Module) -> Choice:
        plan = self(model)
        return Choice(tuple(unit.name for unit in plan.units if unit.name), plan.notes)

    @override
    def __call__(self, model: nn.Module) -> WrapPlan:
        plan = self.function(model)
        if not isinstance(plan, WrapPlan):
            raise ValueError(f'{self} returned a {type(plan).__name__}; expected a WrapPlan')
        return plan

    @override
    def __str__(self) -> str:
        return getattr(self.function, '__name__', type(self.function).__name__)


def build_policy(cfg: Any) -> WrapPolicy:
    """Build a wrap policy.

    Args:
        cfg (str or dict or Sequence or callable, optional): A registered name, or a dict with ``type`` and the
            policy's arguments; a list, of which any may choose (:class:`AnyOf`); a callable from a model to a
            WrapPlan; or, as MMFullyShardedDataParallel takes them, a function ``(module, recurse,
            nonwrapped_numel) -> bool`` or one of torch's policies, given itself, by its name in MMEngine's FUNCTIONS
            or in ``torch.distributed.fsdp.wrap``, or as a dict of either. None: the whole model is one unit.

    Returns:
        WrapPolicy: The policy.

    Raises:
        ValueError: If the name is not registered or the arguments do not fit.
    """
    if cfg is None:
        return OneUnit()
    if isinstance(cfg, WrapPolicy):
        return cfg
    if isinstance(cfg, (list, tuple)):
        return AnyOf([build_policy(item) for item in cfg])
    if isinstance(cfg, str) or isinstance(cfg, type):
        cfg = dict(type=cfg)
    if is_torch_policy(cfg) or callable(cfg) and not isinstance(cfg, Mapping):
        return _from_callable(cfg, {})
    if not isinstance(cfg, Mapping) or 'type' not in cfg:
        raise ValueError("expected a policy's name, or a dict with type, such as dict(type='ModuleClassPolicy', ...)")
    made_of = _look_up(cfg['type'])
    if isinstance(made_of, type) and issubclass(made_of, nn.Module):
        example = _example('ModuleClassPolicy', ['classes'])
        raise ValueError(f"{cfg['type']!r} is a module's class, no policy; to name one, {example}")
    fields = {key: value for key, value in cfg.items() if key != 'type'}
    if not isinstance(made_of, type):
        return _from_callable(made_of, fields)
    _check_fields(made_of, fields)
    if is_torch_policy(made_of):
        fields = {key: _classes(value) for key, value in fields.items()}
    if issubclass(made_of, Combined) and isinstance(fields['policies'], (list, tuple)):
        fields['policies'] = [build_policy(item) for item in fields['policies']]
    if issubclass(made_of, Not):
        fields['policy'] = build_policy(fields['policy'])
    try:
        policy = made_of(**fields)
    except TypeError as error:
        raise ValueError(str(error)) from None
    return policy if isinstance(policy, WrapPolicy) else _from_callable(policy, {})


def _look_up(kind: Any) -> Any:
    if not isinstance(kind, str):
        return kind
    found = WRAP_POLICIES.get(kind)
    if found is None:
        with FUNCTIONS.switch_scope_and_registry(None):
            found = FUNCTIONS.get(kind) or (
                FUNCTIONS.get(f'torch.distributed.fsdp.wrap.{kind}') if kind in TORCHS else None
            )
    if found is None or not callable(found):
        known = [*WRAP_POLICIES.module_dict, *FUNCTIONS.module_dict, *TORCHS]
        raise ValueError(
            f'no wrap policy {kind!r}{near_names(kind, known)} (one of your own is found once custom_imports names its '
            'module)'
        )
    return found


TORCHS = (
    'CustomPolicy',
    'ModuleWrapPolicy',
    'always_wrap_policy',
    'lambda_auto_wrap_policy',
    'size_based_auto_wrap_policy',
    'transformer_auto_wrap_policy',
)
"""Policies of ``torch.distributed.fsdp.wrap`` that are found by their bare names."""


def _from_callable(function: Any, fields: dict[str, Any]) -> WrapPolicy:
    if is_torch_policy(function) and not isinstance(function, type):
        return TorchStylePolicy(function)
    if getattr(function, '__module__', '') == 'torch.distributed.fsdp.wrap' and not fields:
        # Not all of torch's own name what they are called with.
        return TorchStylePolicy(function)
    names = inspect.signature(function).parameters
    if not {'module', 'recurse', 'nonwrapped_numel'} <= names.keys():
        if fields:
            raise ValueError(
                f'{getattr(function, "__name__", function)} takes ({", ".join(names)}); expected a policy, or a '
                'function (module, recurse, nonwrapped_numel)'
            )
        return _Planner(function)
    _check_fields(function, fields, given=('module', 'recurse', 'nonwrapped_numel'))
    classes = {key: _classes(value) if key.endswith('_cls') else value for key, value in fields.items()}
    return TorchStylePolicy(function, **classes)


def _classes(value: Any) -> Any:
    """Classes that a config names by their path, as torch's own policies want them."""
    if isinstance(value, (str, type)):
        return {_class(value)}
    return {_class(item) for item in value} if isinstance(value, (list, tuple, set)) else value


def _class(value: Any) -> Any:
    if isinstance(value, type):
        return value
    found = FUNCTIONS.get(value) if isinstance(value, str) and '.' in value else None
    if not isinstance(found, type):
        raise ValueError(f"{value!r} is no class; give its path, such as 'mmdet.models.backbones.swin.SwinBlock'")
    return found


def _check_fields(made_of: Any, fields: Mapping, given: Sequence[str] = ()) -> None:
    params = {name: param for name, param in inspect.signature(made_of).parameters.items() if name not in given}
    kinds = {param.kind for param in params.values()}
    name_of = made_of.__name__
    unknown = [key for key in fields if key not in params]
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        hints = ' '.join(f'{key!r}{_remedy(str(key), params)}' for key in unknown)
        raise ValueError(f'{name_of} has no field {hints}')
    needed = [name for name, param in params.items() if param.default is param.empty and param.kind in _NAMED]
    missing = [name for name in needed if name not in fields]
    if missing:
        raise ValueError(f'{name_of} needs {", ".join(missing)}; give a dict, {_example(name_of, needed)}')


def _remedy(key: str, known: Mapping) -> str:
    if key == '_delete_':
        return '; remove it: no base has a wrap_policy that it would replace'
    return near_names(key, known)


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

_EXAMPLES = {
    'classes': "['SwinBlock']",
    'depth': '2',
    'names': "['backbone.layers.*']",
    'policies': "['AutoPolicy', ...]",
    'policy': "'AutoPolicy'",
}


def _example(name: str, needed: list[str]) -> str:
    fields = ', '.join(f'{field}={_EXAMPLES.get(field, "...")}' for field in needed)
    return f'such as dict(type={name!r}, {fields})'
