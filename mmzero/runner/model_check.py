"""Faults that the model itself shows: it is built with its parameters on meta."""

import copy
import random
import re
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from mmengine.registry import MODELS, TASK_UTILS, DefaultScope
from torch import nn

from mmzero._compat import build_with_meta_parameters, pretended_process_group
from mmzero.checkpoint import nothing_loaded
from mmzero.config import CheckpointingConfig, Faults, ZeroConfig
from mmzero.config.reader import optional_dtype
from mmzero.config.step import read_grad_norms
from mmzero.engines import build_engine, engine_class, modules_outside_of, plan_units, world_size_of
from mmzero.errors import ConfigError, PlanError
from mmzero.patches import apply_patches
from mmzero.policies import WrapPlan, of_child
from mmzero.policies.plan import innermost
from mmzero.runner.blame import blame, describe_error
from mmzero.runner.lookup import advice
from mmzero.runner.optim_check import check_dimensions
from mmzero.runner.paramwise import check_custom_keys_match, check_tied
from mmzero.runner.several import check_budget, check_children, check_each, is_several, optimizers_of
from mmzero.runner.translate import is_amp, path_of
from mmzero.runner.unread import Record, refuse_unread, watched
from mmzero.wrappers.parts import parts_of
from mmzero.wrappers.regions import chosen_regions


def check_model(cfg: dict, config: ZeroConfig, scope: str, faults: Faults) -> list[str]:
    """Build the model with its parameters on meta and match against it what names parts of it.

    Args:
        cfg (dict): Arguments of the runner and keys of the config.
        config (ZeroConfig): The fields of ``model_wrapper_cfg``.
        scope (str): The default scope.
        faults (Faults): Takes what is wrong.

    Returns:
        list[str]: What is not wrong and may not be meant.
    """
    if cfg.get('model') is None:
        if not faults.at('model'):
            faults.add('model', 'is missing')
        return []
    model = cfg['model']
    if not isinstance(model, nn.Module):
        # Some models ask for the number of ranks when they are built, and are others then.
        with pretended_process_group(_world_size(cfg, config) or 1):
            model = build_on_meta(model, cfg, scope, faults)
    if model is None:
        return []
    _check_plan(cfg, config, model, faults)
    check_regions(cfg, config.activation_checkpointing, model, faults)
    optim_wrapper: Any = cfg.get('optim_wrapper')
    doubts: list[str] = []
    if is_several(optim_wrapper):
        doubts = check_children(optim_wrapper, model, config.separate, faults)
        has_budget = config.activation_checkpointing.memory is not None
        check_budget(optim_wrapper, has_budget, path_of(cfg, 'activation_checkpointing'), faults)
    doubts += _check_paramwise(optim_wrapper, model, scope, faults)
    doubts += whole_outside(model)
    _check_grad_norms(optim_wrapper, model, faults)
    if cfg.get('launcher', 'none') != 'none':
        _check_sync_bn(cfg.get('sync_bn'), model, faults)
    return doubts


def whole_outside(model: nn.Module) -> list[str]:
    """Tell of modules that torch does not see, such as teachers.

    Args:
        model (nn.Module): The model; its parameters may be on the meta device.

    Returns:
        list[str]: A line for each.
    """
    return [
        f'model.{path} lies outside of the module tree: its {sum(param.numel() for param in outside.parameters()):,} '
        'parameters are whole on every rank, in no unit and in no checkpoint'
        for path, outside in modules_outside_of(model).items()
    ]


def _check_paramwise(optim_wrapper: Any, model: nn.Module, scope: str, faults: Faults) -> list[str]:
    if not is_several(optim_wrapper):
        check_tied(optim_wrapper, model, faults)
        check_dimensions(optim_wrapper, model, scope, faults)
        left = check_custom_keys_match(optim_wrapper, model, faults)
        path = 'optim_wrapper.paramwise_cfg.custom_keys'
        return [
            f'{path}: no name of a parameter contains {key!r}, which has no effect on this model{near}'
            for key, near in left.items()
        ]
    if optim_wrapper.get('constructor') is not None:
        return []
    modules = dict(model.named_modules())

    def check(name: str, one: Any, own: Faults) -> list[str]:
        found = _check_paramwise(one, modules[name], scope, own) if name in modules else []
        return [line.replace('optim_wrapper', f'optim_wrapper.{name}', 1) for line in found]

    return [line for found in check_each(optim_wrapper, faults, check).values() for line in found]


def _check_plan(cfg: dict, config: ZeroConfig, model: nn.Module, faults: Faults) -> None:
    path = 'model_wrapper_cfg.wrap_policy'
    try:
        plan = plan_units(model, build_engine(config), _world_size(cfg, config))
    except ConfigError as error:
        faults.lines += error.faults
        return
    except ValueError as error:
        faults.add(path, str(error))
        return
    except Exception as error:
        # A policy may be a project's.
        faults.add(path, describe_error(error))
        return
    optim_wrapper = cfg.get('optim_wrapper')
    if not is_several(optim_wrapper):
        only_root = len(plan.units) == 1 and not engine_class(config).reduces_root
        _check_autocast(optim_wrapper, config, only_root, faults)
    for name, one in optimizers_of(optim_wrapper).items():
        dtypes = config.separate if isinstance(config.separate, dict) else {}
        dtype = of_child(name, dtypes, config.precision.param_dtype)
        own = replace(config, precision=replace(config.precision, param_dtype=dtype))
        inner = [unit for unit in plan.units if unit.name.startswith(f'{name}.') and not unit.is_root]
        _check_autocast(one, own, not inner and bool(config.separate) and _is_child(plan, name), faults)


def _is_child(plan: WrapPlan, name: str) -> bool:
    return any(unit.separate and innermost(unit.name, [name]) for unit in plan.units)


def _check_grad_norms(optim_wrapper: Any, model: nn.Module, faults: Faults, prefix: str = '') -> None:
    if not isinstance(optim_wrapper, dict):
        return
    if is_several(optim_wrapper):
        # A constructor may give each what it likes.
        plain = optim_wrapper.get('constructor') is None
        check_each(
            optim_wrapper,
            faults,
            lambda name, one, own: _check_grad_norms(one, model, own, f'{name}.' if plain else ''),
        )
        return
    try:
        wanted = read_grad_norms(optim_wrapper.get('grad_norms'))
    except ValueError:
        return  # named with the other fields of optim_wrapper
    try:
        parts_of(((name, param) for name, param in model.named_parameters() if name.startswith(prefix)), (), wanted)
    except ValueError as error:
        faults.add('optim_wrapper.grad_norms', str(error))


def check_regions(cfg: dict, config: CheckpointingConfig, model: nn.Module, faults: Faults) -> str:
    """Match ``activation_checkpointing`` against a model.

    Args:
        cfg (dict): Arguments of the runner and keys of the config.
        config (CheckpointingConfig): The field.
        model (nn.Module): The model; it stays as it is.
        faults (Faults): Takes what is wrong.

    Returns:
        str: What would be recomputed.
    """
    path = path_of(cfg, 'activation_checkpointing')
    try:
        applied = apply_patches(model, config, chosen_regions(model, config))
        applied.undo()
        return str(applied)
    except PlanError as error:
        faults.lines.append(path + str(error).removeprefix('activation_checkpointing'))
    except Exception as error:
        # A policy may be a project's.
        faults.add(f'{path}.policy', describe_error(error))
    return ''


def _world_size(cfg: dict, config: ZeroConfig) -> int | None:
    """The number of ranks; None where it is a fault of its own, named already."""
    try:
        world_size = world_size_of(cfg.get('launcher') or 'none')
        config.mesh.sizes(world_size)
        return world_size
    except ValueError:
        return None


def _check_autocast(optim_wrapper: Any, config: ZeroConfig, only_root: bool, faults: Faults) -> None:
    if not isinstance(optim_wrapper, dict):
        return
    dtype = optim_wrapper.get('dtype') or ('bfloat16' if is_amp(optim_wrapper) else None)
    try:
        dtype = optional_dtype(dtype)
    except (TypeError, ValueError):
        return  # named with the other fields of optim_wrapper
    if only_root:
        # The root's remainder keeps its dtype, so that nothing would be gathered in 16 bit.
        config = replace(config, precision=replace(config.precision, param_dtype=None))
    try:
        build_engine(config).check_autocast(dtype)
    except ConfigError as error:
        why = f'without units nothing is gathered in {dtype}; name the classes of the repeated blocks, or use stage 2'
        faults.lines += [f'model_wrapper_cfg.wrap_policy: {why}'] if only_root else error.faults


def build_on_meta(model: dict, cfg: dict, scope: str, faults: Faults) -> nn.Module | None:
    """Build the model with its parameters on meta; random states stay as they are.

    Args:
        model (dict): Its config; not changed.
        cfg (dict): The whole config.
        scope (str): The default scope.
        faults (Faults): Takes what is wrong.

    Returns:
        nn.Module, optional: The model; None, and faults, where it cannot be built.
    """
    random_states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    model = copy.deepcopy(model)
    if cfg.get('data_preprocessor') is not None:
        model.setdefault('data_preprocessor', copy.deepcopy(cfg['data_preprocessor']))
    records: list[Record] = []
    # Held by nothing but the builder, so that what is still there afterwards is kept by the model.
    copies = [watched(model, 'model', records)]
    try:
        with DefaultScope.overwrite_default_scope(scope), nothing_loaded():
            built = build_with_meta_parameters(lambda: MODELS.build(copy.deepcopy(copies[0])))
    except Exception as error:
        # Whatever a constructor of a project may raise: it got what the config says.
        unexpected = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unexpected and any(f'.{unexpected[1]}: ' in line for line in faults.lines):
            return None  # named already, with what is near
        path = blame(error, dict(model=model)) or 'model'
        unknown = re.match(r"['\"]?(\S+) is not in the \S+::(.+?) registry", str(error))
        if isinstance(error, KeyError) and unknown:
            registry = TASK_UTILS if unknown[2] == TASK_UTILS.name else MODELS
            near = advice(registry, unknown[1], scope)
            faults.add(f'{path}.type', f'no class {unknown[1]!r} in the registry {unknown[2]!r}{near}')
        else:
            faults.add(path, f'cannot be built: {describe_error(error)}')
        return None
    finally:
        torch.set_rng_state(random_states[0])
        np.random.set_state(random_states[1])
        random.setstate(random_states[2])
    if not isinstance(built, nn.Module):
        faults.add('model.type', f'builds a {type(built).__name__}; expected a module')
        return None
    copies.clear()
    refuse_unread(records, built, faults)
    return built


def _check_sync_bn(convert: Any, model: nn.Module, faults: Faults) -> None:
    """Refuse norms that ranks compute together where they cannot; a single process makes plain ones of them."""
    of_torch = [name for name, layer in model.named_modules() if isinstance(layer, nn.SyncBatchNorm)]
    of_mmcv = [
        name
        for name, layer in model.named_modules()
        if any(cls.__name__ == 'SyncBatchNorm' and cls.__module__.startswith('mmcv.') for cls in type(layer).__mro__)
    ]
    if not torch.cuda.is_available():
        if convert:
            faults.add('sync_bn', 'SyncBatchNorm needs GPUs; remove it, so that BatchNorm (BN) stays, on CPUs')
        elif of_torch or of_mmcv:
            named = _named(of_torch or of_mmcv)
            advice = "use BatchNorm on CPUs: norm_cfg=dict(type='BN'), in RTMDet use_syncbn=False"
            faults.add('model', f'{named}: SyncBatchNorm needs GPUs; {advice}')
    elif (of_mmcv or convert == 'mmcv') and _lacks_operators():
        why = "the SyncBatchNorm of mmcv needs mmcv's compiled operators, and this is mmcv-lite; install mmcv, or use "
        where, instead = ('model', "norm_cfg=dict(type='SyncBN')") if of_mmcv else ('sync_bn', "sync_bn='torch'")
        faults.add(where, f'{_named(of_mmcv)}: {why}{instead}' if of_mmcv else f'{why}{instead}')


def _named(names: list[str]) -> str:
    return names[0] + (f' and {len(names) - 1} more' if len(names) > 1 else '')


def _lacks_operators() -> bool:
    from mmzero.integrations.mmcv import install_stand_in

    return install_stand_in()
