"""Faults of ``optim_wrapper`` and ``param_scheduler``, found by their fields and by building them on one parameter."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIMIZERS, PARAM_SCHEDULERS, DefaultScope
from torch import nn
from torch.optim import Optimizer

from mmzero.config import Faults, read_loss_scale
from mmzero.config.reader import is_number, optional_dtype
from mmzero.config.step import read_grad_norms, read_max_skips
from mmzero.engines import NO_CLOSURE, needs_closure
from mmzero.errors import near_names
from mmzero.runner.nodes import Nodes
from mmzero.runner.paramwise import DEFAULT_CONSTRUCTOR, check_paramwise
from mmzero.runner.several import check_each, is_several
from mmzero.runner.signatures import check_fields, signature_of
from mmzero.runner.translate import type_name

# clip_grad's type to its fields: the limit first.
CLIP_FIELDS = {
    'norm': ('max_norm', 'norm_type', 'error_if_nonfinite', 'foreach'),
    'value': ('clip_value', 'foreach'),
}
USER_ERRORS = (
    TypeError,
    ValueError,
    LookupError,
    AssertionError,
    AttributeError,
    RuntimeError,
    NotImplementedError,
)


def check_optim_wrappers(cfg: Any, faults: Faults, parts: Nodes) -> Optimizer | dict[str, Optimizer | None] | None:
    """Check one optimizer wrapper, or each of several.

    Args:
        cfg (dict, optional): ``optim_wrapper`` as the user gave it; not changed.
        faults (Faults): Takes what is wrong.
        parts (Nodes): Looks classes up.

    Returns:
        Optimizer or dict[str, Optimizer or None] or None: Those on which schedulers can be tried.
    """
    if not is_several(cfg):
        return check_optim_wrapper(cfg, faults, parts)
    if cfg.get('constructor') is not None:
        _constructor(cfg, faults, parts)
    return check_each(cfg, faults, lambda _, one, own: check_optim_wrapper(one, own, type(parts)(parts.scope, own)))


def check_optim_wrapper(cfg: Any, faults: Faults, parts: Nodes) -> Optimizer | None:
    """Check the optimizer wrapper's fields and build its optimizer on one small parameter.

    Args:
        cfg (dict, optional): ``optim_wrapper`` as the user gave it; not changed.
        faults (Faults): Takes what is wrong.
        parts (Nodes): Looks classes up.

    Returns:
        Optimizer or None: An optimizer on which schedulers can be tried.
    """
    if not isinstance(cfg, Mapping):
        return None
    counts = cfg.get('accumulative_counts', 1)
    if type(counts) is not int or counts < 1:
        faults.add('optim_wrapper.accumulative_counts', f'got {counts!r}; expected an integer of 1 or more')
    try:
        optional_dtype(cfg.get('dtype'))
    except (TypeError, ValueError) as error:
        faults.add('optim_wrapper.dtype', f'got {cfg["dtype"]!r}; {error}')
    _check_clip_grad(cfg.get('clip_grad'), faults)
    _check_loss_scale(cfg, faults)
    for field, read in (('max_skips', read_max_skips), ('grad_norms', read_grad_norms)):
        try:
            read(cfg.get(field))
        except ValueError as error:
            faults.add(f'optim_wrapper.{field}', f'got {cfg[field]!r}; {error}')
    optimizer = cfg.get('optimizer')
    if not isinstance(optimizer, Mapping):
        if 'optimizer' in cfg:
            faults.add(
                'optim_wrapper.optimizer', f"got {optimizer!r}; expected a dict, such as dict(type='AdamW', lr=1e-4)"
            )
        return None
    constructor = _constructor(cfg, faults, parts)
    check_paramwise(cfg.get('paramwise_cfg'), optimizer, constructor, faults)
    return _try_optimizer(optimizer, constructor, faults, parts)


def _check_clip_grad(cfg: Any, faults: Faults) -> None:
    path = 'optim_wrapper.clip_grad'
    if cfg is None:
        return
    if not isinstance(cfg, Mapping):
        faults.add(path, f'got {cfg!r}; expected None or a dict, such as dict(max_norm=0.1)')
        return
    kind = cfg.get('type', 'norm')
    if kind not in tuple(CLIP_FIELDS):
        faults.add(f'{path}.type', f"got {kind!r}; allowed: 'norm', 'value'")
        return
    limit, *_ = known = CLIP_FIELDS[kind]
    for field in cfg:
        if field != 'type' and field not in known:
            owner = next((other for other, names in CLIP_FIELDS.items() if field in names), None)
            why = f"belongs to type='{owner}', and this is '{kind}'" if owner else 'unknown field'
            faults.add(f'{path}.{field}', f'{why}{near_names(str(field), known)}')
    if limit not in cfg:
        faults.add(f'{path}.{limit}', f'is missing; clipping by {kind} needs it')
    for field in (limit, 'norm_type'):
        # torch's own documentation has 'inf' as a string.
        if field == 'norm_type' and cfg.get(field) == 'inf':
            continue
        if field in cfg and field in known and not (is_number(cfg[field]) and cfg[field] > 0):
            faults.add(f'{path}.{field}', f'got {cfg[field]!r}; expected a number above 0')
    for field in ('error_if_nonfinite', 'foreach'):
        if cfg.get(field) is not None and not isinstance(cfg[field], bool):
            faults.add(f'{path}.{field}', f'got {cfg[field]!r}; allowed: True, False')


def _check_loss_scale(cfg: Mapping, faults: Faults) -> None:
    for field in ('loss_scale', 'use_fsdp'):
        plain = type_name(cfg.get('type', 'OptimWrapper')) == 'OptimWrapper' and cfg.get('dtype') is None
        if cfg.get(field) is not None and plain:
            faults.add(
                f'optim_wrapper.{field}', "is a field of 'AmpOptimWrapper', and this is 'OptimWrapper'; remove it"
            )
            return
    scale = cfg.get('loss_scale')
    try:
        read_loss_scale(scale)
    except ValueError as error:
        faults.add('optim_wrapper.loss_scale', f'got {scale!r}; {error}')


def _constructor(cfg: Mapping, faults: Faults, parts: Nodes) -> Callable | None:
    given = cfg.get('constructor', DEFAULT_CONSTRUCTOR)
    holder = dict(type=given)
    return parts.find(holder, 'optim_wrapper.constructor', OPTIM_WRAPPER_CONSTRUCTORS, field='')


def _try_optimizer(cfg: Mapping, constructor: Callable | None, faults: Faults, parts: Nodes) -> Optimizer | None:
    path = 'optim_wrapper.optimizer'
    cls = parts.find(cfg, path, OPTIMIZERS)
    if cls is None:
        return None
    first = next(iter(signature_of(cls).params), 'params')
    plain = getattr(constructor, '__name__', DEFAULT_CONSTRUCTOR) == DEFAULT_CONSTRUCTOR
    before = len(faults.lines)
    # Another constructor may add arguments.
    check_fields(cls, cfg, path, faults, provided=(first,), check_required=plain)
    lr = cfg.get('lr')
    if lr is not None and is_number(lr) and lr < 0:
        faults.add(f'{path}.lr', f'got {lr!r}; expected a number of 0 or more')
    if isinstance(cls, type) and issubclass(cls, Optimizer) and needs_closure(cls):
        faults.add(f'{path}.type', f'{type_name(cfg["type"])}: {NO_CLOSURE}')
    if len(faults.lines) > before or not plain:
        return None
    errors: list[Exception] = []
    # Some take matrices only, some vectors only.
    for shape in ((2, 2), (2,)):
        params = [nn.Parameter(torch.zeros(shape))]
        try:
            return cls(params, **_settings(cfg))
        except USER_ERRORS as error:
            errors.append(error)
    faults.add(path, f'{type_name(cfg["type"])} refuses its arguments: {errors[0]}')
    return None


def _settings(cfg: Mapping) -> dict[str, Any]:
    """Arguments of an optimizer, copied, without what names its class."""
    return {key: copy.deepcopy(value) for key, value in cfg.items() if key not in ('type', '_scope_')}


def check_dimensions(cfg: Any, model: nn.Module, scope: str, faults: Faults) -> None:
    """Build the optimizer on one small parameter of each number of dimensions that the model's parameters have.

    Args:
        cfg (dict, optional): ``optim_wrapper``. Constructors of other packages choose parameters by themselves.
        model (nn.Module): The model; its parameters may be on the meta device.
        scope (str): The default scope.
        faults (Faults): Takes what the optimizer refuses, such as torch's Muon all but matrices. Nothing is added where
            the optimizer has a fault already.
    """
    optimizer = cfg.get('optimizer') if isinstance(cfg, Mapping) else None
    path = 'optim_wrapper.optimizer'
    plain = isinstance(cfg, Mapping) and cfg.get('constructor', DEFAULT_CONSTRUCTOR) == DEFAULT_CONSTRUCTOR
    if not isinstance(optimizer, Mapping) or not plain or faults.at(path):
        return
    with DefaultScope.overwrite_default_scope(scope):
        cls = OPTIMIZERS.get(optimizer['type']) if isinstance(optimizer.get('type'), str) else optimizer.get('type')
    if not callable(cls):
        return
    examples: dict[int, str] = {}
    for name, param in model.named_parameters():
        examples.setdefault(param.dim(), name)
    for dims, name in sorted(examples.items()):
        try:
            cls([nn.Parameter(torch.zeros((2,) * dims))], **_settings(optimizer))
        except USER_ERRORS as error:
            faults.add(
                path,
                f'{type_name(optimizer["type"])} refuses parameters of {dims} dimensions, such as {name}: {error}. Use '
                'an optimizer that treats the others in another way by itself (timm.optim.Muon does), or register a '
                'constructor that gives it those that it takes, and a second optimizer the rest',
            )
            return


def by_optimizer(cfg: Any) -> bool:
    """Whether ``param_scheduler`` is a dict of the schedulers of several optimizers."""
    return (
        isinstance(cfg, Mapping)
        and 'type' not in cfg
        and all(isinstance(v, (Mapping, list, tuple)) for v in cfg.values())
    )


def own_schedulers(cfg: Any) -> list[tuple[str, Any]]:
    """The schedulers of several optimizers: config path, and a dict or a list.

    Args:
        cfg (dict or list, optional): ``param_scheduler``.

    Returns:
        list[tuple[str, Any]]: One entry where they share them.
    """
    if not by_optimizer(cfg):
        return [('param_scheduler', cfg)]
    return [(f'param_scheduler.{name}', own) for name, own in cfg.items()]


def check_several_schedulers(
    cfg: Any, optimizers: Mapping[str, Optimizer | None], train_cfg: Any, scope: str, faults: Faults
) -> None:
    """Check the schedulers of several optimizers, which share them or have their own.

    Args:
        cfg (dict or list, optional): ``param_scheduler``.
        optimizers (Mapping[str, Optimizer or None]): By name; none where a constructor decides.
        train_cfg (dict, optional): As for :func:`check_schedulers`.
        scope (str): The default scope.
        faults (Faults): Takes what a constructor refuses, and names of no optimizers.
    """
    own = by_optimizer(cfg)
    for name in (cfg.keys() - optimizers.keys()) if own and optimizers else ():
        faults.add(f'param_scheduler.{name}', f'is no optimizer of optim_wrapper{near_names(str(name), optimizers)}')
    for name, optimizer in optimizers.items():
        if own and name not in cfg:
            faults.add(f'param_scheduler.{name}', 'is missing; where one optimizer has its own, all have ([] is none)')
            continue
        theirs = Faults()
        check_schedulers(cfg[name] if own else cfg, optimizer, train_cfg, scope, theirs)
        if own:
            theirs.lines = [line.replace('param_scheduler', f'param_scheduler.{name}', 1) for line in theirs.lines]
        faults.lines += [line for line in theirs.lines if line not in faults.lines]


def check_schedulers(cfg: Any, optimizer: Optimizer | None, train_cfg: Any, scope: str, faults: Faults) -> None:
    """Build each scheduler by itself, on a copy of the optimizer that was tried.

    Args:
        cfg (dict or list, optional): ``param_scheduler``.
        optimizer (Optimizer, optional): From :func:`check_optim_wrapper`; None: another one stands in for it.
        train_cfg (dict, optional): Its length is the default end of a scheduler.
        scope (str): The default scope.
        faults (Faults): Takes what a constructor refuses. Faults of fields are left to others.
    """
    single = not isinstance(cfg, (list, tuple))
    for index, item in enumerate([cfg] if single else cfg):
        path = 'param_scheduler' if single else f'param_scheduler[{index}]'
        if isinstance(item, Mapping) and not faults.at(path):
            _try_scheduler(item, path, optimizer, train_cfg, scope, faults)


def _try_scheduler(
    cfg: Mapping, path: str, optimizer: Optimizer | None, train_cfg: Any, scope: str, faults: Faults
) -> None:
    settings = copy.deepcopy(dict(cfg))
    by_epoch = settings.get('by_epoch', True)
    length = train_cfg.get('max_epochs' if by_epoch else 'max_iters') if isinstance(train_cfg, Mapping) else None
    if is_number(length):
        settings.setdefault('end', length)
    # Schedulers change the groups of the optimizer and wrap its step.
    own = _stand_in() if optimizer is None else copy.deepcopy(optimizer)
    try:
        with DefaultScope.overwrite_default_scope(scope):
            PARAM_SCHEDULERS.build(settings, default_args=dict(optimizer=own, epoch_length=1000))
    except USER_ERRORS as error:
        # The real optimizer may have a setting that is scheduled and that the one in its place lacks.
        if optimizer is not None or not isinstance(error, KeyError):
            faults.add(path, f'{type_name(cfg.get("type", ""))} refuses its arguments: {error}')


def _stand_in() -> Optimizer:
    """An optimizer whose learning rate and momentum can be scheduled."""
    return torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
