"""Methods other than forward by which a unit is entered.

[Note: methods of a unit]
``torch.distributed.fsdp.register_fsdp_forward_method`` gathers a unit around a method as around its forward. What it
leaves open is done here: a method that is called within the unit's forward, or within such a method, does not reshard
the unit under its caller's feet, nor does a forward that a method runs, so that the method may go on with parameters.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from mmzero._compat import kept_gathered
from mmzero.errors import PlanError, near_names
from mmzero.policies import Unit


def check_methods(module: nn.Module, unit: Unit) -> None:
    """Refuse methods that a unit cannot be entered by.

    Args:
        module (nn.Module): The unit's module.
        unit (Unit): The unit.

    Raises:
        PlanError: If one does not exist, or runs after it has returned.
    """
    for name in unit.methods:
        method = getattr(module, name, None)
        said = f'the method {name} of the unit {unit.name or "(root)"} ({unit.class_name})'
        if name == 'forward' or not callable(method):
            known = [key for key, value in inspect.getmembers(type(module), callable) if not key.startswith('__')]
            raise PlanError(f'{said} is none that it can be entered by besides forward{near_names(name, known)}')
        if any(kind(method) for kind in _LATER):
            raise PlanError(
                f'{said} is a generator or a coroutine, whose body runs when its parameters are shards again; leave '
                f'{unit.class_name} out of wrap_policy'
            )


_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def enter_by_methods(module: Any, names: Iterable[str], gathered: Callable[[], None] | None = None) -> None:
    """Gather a unit around some of its methods.

    Args:
        module (FSDPModule): The sharded unit.
        names (Iterable[str]): The methods; replaced on the instance.
        gathered (Callable, optional): Called each time the parameters are in place. Defaults to None.
    """
    names = list(names)
    if not names:
        return
    inside = _Inside()
    module.register_forward_pre_hook(inside.enter)
    module.register_forward_hook(inside.leave, always_call=True)
    for name in names:
        plain = getattr(module, name)
        setattr(module, name, _within(module, plain, gathered))
        register_fsdp_forward_method(module, name)
        setattr(module, name, inside.choose(plain, getattr(module, name)))


def _within(module: Any, method: Callable, gathered: Callable[[], None] | None) -> Callable:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if gathered is not None:
            gathered()
        with kept_gathered(module):
            return method(*args, **kwargs)

    return run


class _Inside:
    """Whether the forward or a method of a unit runs."""

    def __init__(self) -> None:
        self.depth = 0

    def enter(self, *_: Any) -> None:
        self.depth += 1

    def leave(self, *_: Any) -> None:
        self.depth -= 1

    def choose(self, plain: Callable, entering: Callable) -> Callable:
        """The method as it is within the unit, and the one that gathers from outside of it."""

        @functools.wraps(plain)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.depth:
                return plain(*args, **kwargs)
            self.depth += 1
            try:
                return entering(*args, **kwargs)
            finally:
                self.depth -= 1

        return run
