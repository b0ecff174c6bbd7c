"""Policies as torch's FSDP1 and MMFullyShardedDataParallel take them."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from typing_extensions import override

from mmzero.errors import PlanError
from mmzero.policies.eligible import ineligible
from mmzero.policies.policy import Choice, WrapPolicy
from mmzero.policies.tied import without_tied


class TorchStylePolicy(WrapPolicy):
    """Units that a function ``(module, recurse, nonwrapped_numel) -> bool`` asks for.

    It is called as ``torch.distributed.fsdp.wrap`` calls it: with ``recurse=True`` on the way down, whether to look
    into a module, and with ``recurse=False`` on the way up, whether to make it a unit, with the number of its
    parameters that no unit below holds. ``ModuleWrapPolicy`` and ``CustomPolicy`` are taken, too. Modules that cannot
    be units are passed over with a line in the plan, since such functions do not know the model's code.

    Args:
        function (Callable): The function, or a policy object of ``torch.distributed.fsdp.wrap``.
        arguments (dict): Its other arguments. Defaults to none.
    """

    def __init__(self, function: Any, **arguments: Any) -> None:
        self.function = function
        self.arguments = arguments

    @override
    def choose(self, model: nn.Module) -> Choice:
        found: list[str] = []
        reasons = ineligible(model)
        passed_over: dict[str, str] = {}
        try:
            if is_torch_policy(self.function):
                wanted = self.function._run_policy(model, set(), {})
                found = [name for name, module in model.named_modules() if name and module in wanted]
                passed_over = {name: reasons[name] for name in found if name in reasons}
                found = [name for name in found if name not in reasons]
            else:
                ask = functools.partial(self.function, **self.arguments)
                _walk(model, '', ask, reasons, found, passed_over)
        except TypeError as error:
            # Most likely an argument of a wrong type, which such functions do not check.
            raise PlanError(f'{self} fails on {type(model).__name__}, check its arguments: {error}') from error
        units, tied = without_tied(model, found)
        left = [f'{name} is no unit: {reason}' for name, reason in passed_over.items()]
        if not units:
            why = f' ({left[0]})' if left else ''
            raise PlanError(f'{self}: it makes no module of {type(model).__name__} a unit{why}')
        return Choice(tuple(units), (*left, *tied))

    @override
    def __str__(self) -> str:
        name = getattr(self.function, '__name__', type(self.function).__name__)
        fields = ', '.join(f'{key}={value}' for key, value in self.arguments.items())
        return f'{name}({fields})' if fields else name


def is_torch_policy(value: Any) -> bool:
    """Whether something is a policy object of torch's, or a class of them; without importing torch.distributed.

    Args:
        value: Anything.

    Returns:
        bool: Whether it is.
    """
    return hasattr(value, '_run_policy')


def _walk(
    module: nn.Module,
    name: str,
    ask: Callable,
    reasons: dict[str, str],
    found: list[str],
    passed_over: dict[str, str],
) -> int:
    """Returns the parameters of a module that units hold; in the order of torch's ``_recursive_wrap``."""
    numel = sum(param.numel() for param in module.parameters())
    if not ask(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    taken = sum(
        _walk(child, f'{name}.{child_name}'.lstrip('.'), ask, reasons, found, passed_over)
        for child_name, child in module.named_children()
    )
    if name and numel and ask(module=module, recurse=False, nonwrapped_numel=numel - taken):
        if name not in reasons:
            found.append(name)
            return numel
        passed_over[name] = reasons[name]
    return taken
