"""Uses of a unit's parameters from outside of the unit, told by name.

[Note: outside of a unit]
Between forward and backward a unit's parameters are shards (DTensors), and the model computes on plain tensors. A model
that calls a module inside a unit by another way than the unit's forward, or reads a parameter of it, mixes the two,
and torch says "got mixed torch.Tensor and DTensor" without saying where. In the first iteration of each kind a torch
function mode sees every operation that is given a shard, and what was computed from one. Where such an operation fails,
the parameter it came from, and who brought it, are known. What does not fail is left alone: right after the forward of
a unit that stays gathered (stages 1 and 2), its parameters are plain and their gradients right.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from mmzero._compat import TorchFunctionMode
from mmzero.errors import PlanError, ZeroError
from mmzero.policies import Unit, WrapPlan, without


@dataclass(frozen=True)
class _Use:
    """A shard that was brought out of its unit.

    Args:
        param (str): Name of the parameter.
        unit (Unit): Its unit.
        module (str): Path of the module inside the unit that was called, or that holds the parameter.
        how (str): What was done with it.
        caller (str): Who did it: file, line and function.
    """

    param: str
    unit: Unit
    module: str
    how: str
    caller: str

    def error(self) -> PlanError:
        name = self.unit.name or '(root)'
        leave = (
            f'leave {self.unit.class_name} out of wrap_policy, or name a module as a unit that holds both, so that '
            f'the caller and what it uses are in one unit: {without(self.unit.class_name)}, where POLICY is what '
            'stands there now'
            if not self.unit.is_root
            else f'call {self.unit.name or "the model"} itself'
        )
        return PlanError(
            f'{self.caller} {self.how} of {self.module or "the model"}, which lies in the unit {name} '
            f'({self.unit.class_name}), but not within the forward of {name}: there its parameters ({self.param}) are '
            f'shards. To mend it, {leave}'
        )


class OutsideUses(TorchFunctionMode):
    """While it is entered, operations that fail on shards raise an error that says whose shards they are.

    Args:
        model (nn.Module): The sharded model.
        plan (WrapPlan): Its units.
    """

    def __init__(self, model: nn.Module, plan: WrapPlan) -> None:
        super().__init__()
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        self.units = {name: unit for unit in plan.units for name in unit.params}
        # What was computed from shards: still shards, and of the same origin.
        self.origins = WeakIdKeyDictionary()

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation.

        Args:
            func (Callable): The operation.
            types (tuple): Classes of its arguments that override operations.
            args (tuple): Its arguments.
            kwargs (dict, optional): Its keyword arguments.

        Returns:
            Any: Its result.

        Raises:
            PlanError: If it fails, and was given a parameter of a unit from outside of the unit.
        """
        # What fails in an operation is no failure of this one, which passes all of them on.
        __tracebackhide__ = True
        kwargs = kwargs or {}
        shards = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
        if not shards:
            return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            use = None if isinstance(error, ZeroError) else self._use(shards)
            if use is None:
                raise
            raise use.error() from error
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, DTensor)]
        use = self._use(shards) if made else None
        if use is not None:
            self.origins.update((leaf, use) for leaf in made if leaf not in self.origins)
        return result

    def check(self, loss: Any) -> None:
        """Refuse a loss that was computed from shards alone, whose gradients would not be averaged.

        Args:
            loss (Any): The loss, of any type.

        Raises:
            PlanError: If it is one.
        """
        use = self._use([loss]) if isinstance(loss, DTensor) else None
        if use is not None:
            raise use.error()

    def _use(self, shards: list[DTensor]) -> _Use | None:
        """How the first of some shards was brought here; None where FSDP2 itself did it."""
        for shard in shards:
            if shard in self.origins:
                return self.origins[shard]
        names = {id(param): name for name, param in self.model.named_parameters(remove_duplicate=False)}
        for shard in shards:
            name = names.get(id(shard))
            if name in self.units:
                return self._trace(name, self.units[name])
        return None

    def _trace(self, param: str, unit: Unit) -> _Use | None:
        inside = set(self.model.get_submodule(unit.name).modules())
        entered: tuple[str, str] | None = None
        first: FrameType | None = None
        for frame in _frames():
            owner, package = frame.f_locals.get('self'), frame.f_globals.get('__name__', '')
            if package.startswith('torch.distributed.'):
                return None
            if isinstance(owner, nn.Module) and owner in inside and (owner in self.names):
                if frame.f_code.co_name not in _CALLS:
                    entered = self.names[owner], frame.f_code.co_name
                continue
            if package.split('.')[0] in ('torch', 'mmzero'):
                continue
            first = first or frame
            if isinstance(owner, nn.Module):
                return self._found(param, unit, entered, frame)
        return self._found(param, unit, entered, first) if first is not None else None

    def _found(self, param: str, unit: Unit, entered: tuple[str, str] | None, frame: FrameType) -> _Use:
        module, _, attribute = param.rpartition('.')
        code = frame.f_code
        # Python 3.11 has the qualified name.
        caller = f'{code.co_filename}:{frame.f_lineno} ({getattr(code, "co_qualname", code.co_name)})'
        if entered is None:
            return _Use(param, unit, module, f'reads the parameter {attribute}', caller)
        return _Use(param, unit, entered[0], f'calls {entered[1]}()', caller)


_CALLS = ('__call__', '_call_impl', '_wrapped_call_impl')


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get('__name__') != __name__:
            yield frame
        frame = frame.f_back
