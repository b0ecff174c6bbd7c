"""Several optimizers in a config: which they are, and each checked as one by itself."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mmengine.logging import print_log
from mmengine.optim import OptimWrapper, OptimWrapperDict, build_optim_wrapper
from torch import nn

from mmzero.config import Faults
from mmzero.errors import ConfigError, near_names
from mmzero.policies import separate_children
from mmzero.wrappers import ZeroOptimWrapper
from mmzero.wrappers.several import NO_BUDGET, NO_OWN_STEP, each, has_own_step

T = TypeVar('T')
PATH = 'optim_wrapper'


def optimizers_of(cfg: Any) -> dict[str, Any]:
    """Find the optimizer wrappers in an ``optim_wrapper`` that has several.

    Args:
        cfg (dict or OptimWrapper, optional): ``optim_wrapper``.

    Returns:
        dict[str, Any]: By name; empty where it is one.
    """
    if not isinstance(cfg, Mapping) or 'optimizer' in cfg:
        return {}
    return {
        name: value
        for name, value in cfg.items()
        if isinstance(value, OptimWrapper) or (isinstance(value, Mapping) and 'optimizer' in value)
    }


def is_several(cfg: Any) -> bool:
    """Whether an ``optim_wrapper`` is of several optimizers, or left to a constructor that may build several.

    Args:
        cfg (dict or OptimWrapper, optional): ``optim_wrapper``.

    Returns:
        bool: Whether it is.
    """
    return bool(optimizers_of(cfg)) or (
        isinstance(cfg, Mapping) and 'optimizer' not in cfg and cfg.get('constructor') is not None
    )


def check_each(cfg: Any, faults: Faults, check: Callable[[str, Any, Faults], T]) -> dict[str, T]:
    """Run a check of one ``optim_wrapper`` on each of several.

    Args:
        cfg (dict): ``optim_wrapper``.
        faults (Faults): Takes what is wrong, at the paths of the single ones.
        check (Callable): Is given the name of one of them, it, and what takes its faults.

    Returns:
        dict[str, T]: What the check returned, by name.
    """
    found = {}
    for name, one in optimizers_of(cfg).items():
        own = Faults()
        found[name] = check(name, one, own)
        own.move(PATH, f'{PATH}.{name}')
        faults.lines += own.lines
    return found


def check_children(cfg: Mapping, model: nn.Module, several: Any, faults: Faults) -> list[str]:
    """Hold the optimizers against the model.

    Args:
        cfg (Mapping): ``optim_wrapper``.
        model (nn.Module): The model; its parameters may be on the meta device.
        several (bool or dict): ``model_wrapper_cfg.separate``.
        faults (Faults): Takes names of no children, and a model without a ``train_step`` of its own.

    Returns:
        list[str]: What is not wrong and may not be meant.
    """
    if not has_own_step(model):
        faults.add('model', f'{type(model).__name__} {NO_OWN_STEP}')
    if cfg.get('constructor') is not None:
        return []
    names = [name for name, _ in model.named_children()]
    modules = dict(model.named_modules())
    for name in optimizers_of(cfg):
        where = f'{PATH}.{name}'
        if name not in modules:
            faults.add(where, f'is no child of {type(model).__name__}{near_names(name, names)}')
        elif not any(param.requires_grad for param in modules[name].parameters()):
            faults.add(where, f'{name} has no trained parameters; leave its optimizer out')
    if not several or faults.at(PATH):
        return []
    try:
        children = separate_children(model)
    except ConfigError:
        return []  # told with the plan
    left = [child for child in children if not any(f'{child}.'.startswith(f'{name}.') for name in optimizers_of(cfg))]
    left = [child for child in left if not any(name.startswith(f'{child}.') for name in optimizers_of(cfg))]
    return [f'{PATH}: {child} has trained parameters and no optimizer, and stays as it is' for child in left]


def check_budget(cfg: Any, has_budget: bool, path: str, faults: Faults) -> None:
    """Refuse a budget beside several optimizers.

    Args:
        cfg (dict, optional): ``optim_wrapper``.
        has_budget (bool): Whether there is one.
        path (str): Where.
        faults (Faults): Takes it.
    """
    if has_budget and is_several(cfg):
        faults.add(path, NO_BUDGET.removeprefix('activation_checkpointing: '))


def build_several(model: nn.Module, cfg: Mapping) -> OptimWrapperDict:
    """Build an optimizer for each child that the config names, as one of a model of its own.

    Args:
        model (nn.Module): The sharded model.
        cfg (Mapping): ``optim_wrapper``, translated, without a constructor.

    Returns:
        OptimWrapperDict: The optimizer wrappers by child.
    """
    return OptimWrapperDict(
        **{name: build_optim_wrapper(model.get_submodule(name), one) for name, one in optimizers_of(cfg).items()}
    )


def check_built(optim_wrapper: OptimWrapper) -> None:
    """Refuse what a constructor of a project has built past the config.

    Args:
        optim_wrapper (OptimWrapper): What it built.

    Raises:
        ConfigError: If it is not of ZeroOptimWrappers.
    """
    wrong = [
        f'{path}: optim_wrapper.constructor built {article(wrapper)}, which knows nothing of shards; let it build what '
        "'type' says, which is ZeroOptimWrapper here"
        for path, wrapper in each(optim_wrapper).items()
        if not isinstance(wrapper, ZeroOptimWrapper)
    ]
    if wrong:
        raise ConfigError(wrong)
    if isinstance(optim_wrapper, OptimWrapperDict):
        print_log(f'optimizers: {", ".join(optim_wrapper.keys())}', 'current', logging.INFO)


def article(value: Any) -> str:
    """A value's class with its article."""
    name = type(value).__name__
    return f'{"an" if name[0] in "AEIOU" else "a"} {name}'
