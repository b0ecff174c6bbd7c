"""From a function that asks for modules to be recomputed to the classes of these modules."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mmengine.registry import FUNCTIONS
from torch import nn

from mmzero.config import Faults
from mmzero.runner.blame import describe_error
from mmzero.runner.check import default_scope
from mmzero.runner.model_check import build_on_meta
from mmzero.runner.offline import no_network


def classes_asked_for(check_fn: Any, cfg: dict[str, Any]) -> list[str] | str:
    """Ask a ``check_fn`` of ``apply_activation_checkpointing`` about every module of a config's model.

    Args:
        check_fn (str or dict or Callable): As FSDPStrategy takes it.
        cfg (dict): The config, whose model is built with its parameters on meta.

    Returns:
        list[str] or str: The names of the classes; or why there are none.
    """
    try:
        asks = _function(check_fn)
    except (ValueError, ImportError, AttributeError) as error:
        return str(error)
    model = _build(cfg)
    if isinstance(model, str):
        return model
    try:
        answers = [(type(module).__name__, bool(asks(module))) for name, module in model.named_modules() if name]
    except Exception as error:
        # A project's function.
        return f'it fails on the model: {describe_error(error)}'
    wanted = sorted({name for name, asked in answers if asked})
    if not wanted:
        return 'it asks for no module of this model'
    mixed = sorted({name for name, asked in answers if not asked and name in wanted})
    return f'it asks for some modules of {", ".join(mixed)} and not for others' if mixed else wanted


def _function(check_fn: Any) -> Callable[[nn.Module], Any]:
    arguments: dict[str, Any] = {}
    if isinstance(check_fn, Mapping):
        arguments = {name: value for name, value in check_fn.items() if name != 'type'}
        check_fn = check_fn.get('type')
    if isinstance(check_fn, str):
        name = check_fn
        with FUNCTIONS.switch_scope_and_registry(None):
            check_fn = FUNCTIONS.get(name)
        if check_fn is None:
            raise ValueError(f'no function {name!r} is registered')
    if not callable(check_fn):
        raise ValueError('it is no function')
    known = inspect.signature(check_fn).parameters
    unknown = [name for name in arguments if name not in known]
    if unknown:
        raise ValueError(f'it takes no argument {", ".join(unknown)}')
    return functools.partial(check_fn, **{name: _classes(value) for name, value in arguments.items()})


def _classes(value: Any) -> Any:
    """Paths of classes as the classes, which such functions compare with."""
    if isinstance(value, (list, tuple)):
        return tuple(_classes(item) for item in value)
    found = FUNCTIONS.get(value) if isinstance(value, str) and '.' in value else None
    return found if isinstance(found, type) else value


def _build(cfg: dict[str, Any]) -> nn.Module | str:
    faults = Faults()
    scope, model = default_scope(cfg, faults), cfg.get('model')
    built = None
    if scope is not None and isinstance(model, dict):
        with no_network():
            built = build_on_meta(model, cfg, scope, faults)
    return built if built is not None else f'the model cannot be built to ask it ({"; ".join(faults.lines)})'
