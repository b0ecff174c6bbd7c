"""Several optimizers in a ``train_step`` of the model's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper, OptimWrapperDict
from torch import nn

from mmzero.engines import Engine
from mmzero.errors import ConfigError


def each(optim_wrapper: OptimWrapper) -> dict[str, OptimWrapper]:
    """The optimizer wrappers by their names in a config.

    Args:
        optim_wrapper (OptimWrapper): One, or an OptimWrapperDict.

    Returns:
        dict[str, OptimWrapper]: By config path.
    """
    if not isinstance(optim_wrapper, OptimWrapperDict):
        return {'optim_wrapper': optim_wrapper}
    return {f'optim_wrapper.{name}': wrapper for name, wrapper in optim_wrapper.items()}


def check_wrappers(optim_wrapper: OptimWrapper, engine: Engine) -> None:
    """Refuse optimizers of another model.

    Args:
        optim_wrapper (OptimWrapper): What a train_step was given.
        engine (Engine): The model's.

    Raises:
        ConfigError: If one was not built on this model.
    """
    own = {id(part) for part in engine.parts}
    wrong = [
        f'{path}: a {type(wrapper).__name__} that was not built on this model; build a ZeroOptimWrapper on the '
        'parameters of the wrapped model'
        for path, wrapper in each(optim_wrapper).items()
        if (theirs := getattr(wrapper, 'engine', None)) is None or not own.issuperset(map(id, theirs.parts))
    ]
    if wrong:
        raise ConfigError(wrong)


def has_own_step(model: nn.Module) -> bool:
    """Whether a model has a ``train_step`` that is not MMEngine's, which knows one optimizer.

    Args:
        model (nn.Module): The model.

    Returns:
        bool: Whether it has.
    """
    step = getattr(type(model), 'train_step', None)
    return step is not None and step is not BaseModel.train_step


NO_OWN_STEP = (
    "has no train_step of its own, and BaseModel's knows one optimizer and calls the model as a whole; define "
    'train_step(self, data, optim_wrapper), which calls the networks and update_params of each optimizer'
)


def check_own_step(model: nn.Module, has_budget: bool) -> None:
    """Refuse what the model's own step cannot be given.

    Args:
        model (nn.Module): The model.
        has_budget (bool): Whether a budget chooses what is recomputed.

    Raises:
        ConfigError: If it has no ``train_step``, or there is a budget, which counts one forward and backward a step.
    """
    if not has_own_step(model):
        raise ConfigError([f'model: {type(model).__name__} {NO_OWN_STEP}'])
    if has_budget:
        raise ConfigError([NO_BUDGET])


NO_BUDGET = (
    "activation_checkpointing: type='Budget' looks at what one forward keeps for its backward, and a train_step with "
    'several optimizers has several of each; name the modules instead'
)


@contextmanager
def standing_in(optim_wrapper: OptimWrapper) -> Iterator[None]:
    """Let losses count as zero, since the batch is one that stands in ([Note: a batch that stands in]).

    Args:
        optim_wrapper (OptimWrapper): One, or an OptimWrapperDict, of ZeroOptimWrappers.

    Yields:
        None: The step runs inside.
    """
    wrappers: list[Any] = list(each(optim_wrapper).values())
    for wrapper in wrappers:
        wrapper.is_stand_in = True
    try:
        yield
    finally:
        for wrapper in wrappers:
            wrapper.is_stand_in = False
