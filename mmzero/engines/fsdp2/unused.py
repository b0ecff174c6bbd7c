"""Parameters that a rank did not use, as ``find_unused_parameters=True`` treats them under DDP.

[Note: unused parameters]
Ranks that use different parameters would reduce-scatter different sizes. torch's ``set_reduce_scatter_unused_params``
lets them contribute zeros. But a parameter that no rank used then has a gradient of zeros, with which weight decay
and momentum would move it; under DDP it has none and stays. So each rank notes which parameters received a gradient,
one all-reduce per optimizer step joins the notes, and what nobody used loses its zeros.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from mmzero.policies import Unit, WrapPlan


class UnusedParameters:
    """Notes which parameters received a gradient since the last step.

    Args:
        model (nn.Module): The sharded model.
        plan (WrapPlan): Its units.
        device (torch.device): Where the notes are reduced.
    """

    def __init__(self, model: nn.Module, plan: WrapPlan, device: torch.device) -> None:
        self.device = device
        sharded = _sharded(model, plan)
        self.sharded = list(sharded.values())
        self.index = {name: i for i, name in enumerate(sharded)}
        self.used = torch.zeros(len(self.sharded), dtype=torch.int32)
        self.notes = True
        self._hooked = WeakIdKeyDictionary()
        self.watchers = {unit.name: self._watcher(model, unit) for unit in plan.units}
        for name, watch in self.watchers.items():
            # Runs after FSDP2's own hook, so that the gathered parameters are in place.
            model.get_submodule(name).register_forward_pre_hook(lambda *_, watch=watch: watch())

    def _watcher(self, model: nn.Module, unit: Unit) -> Callable[[], None]:
        """Hooks the parameters of a unit that is gathered; once each."""
        slots = [(*_slot(model, name), self.index[name]) for name in unit.params if name in self.index]

        def watch() -> None:
            for owner, name, index in slots:
                param = getattr(owner, name)
                # Models freeze a network while another one trains.
                if param.requires_grad and param not in self._hooked:
                    self._hooked[param] = param.register_post_accumulate_grad_hook(self._note(index))

        return watch

    def _note(self, index: int) -> Callable[[Tensor], None]:
        def note(_: Tensor) -> None:
            if self.notes:
                self.used[index] = 1

        return note

    @contextmanager
    def not_noting(self) -> Iterator[None]:
        """Leave gradients out of the notes that are zeros, and no part of the step.

        Yields:
            None: What receives a gradient inside does not count as used.
        """
        self.notes = False
        try:
            yield
        finally:
            self.notes = True

    def drop_zeros(self, only: set[int] | None = None) -> None:
        """Take the gradients of parameters that no rank used. Collective, once per optimizer step.

        Args:
            only (set[int], optional): ``id`` of the parameters that step. Defaults to None: all.
        """
        used = self.used.to(self.device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        for index, (param, flag) in enumerate(zip(self.sharded, used.tolist(), strict=True)):
            if only is None or id(param) in only:
                self.used[index] = 0
                param.grad = param.grad if flag else None


def _sharded(model: nn.Module, plan: WrapPlan) -> dict[str, nn.Parameter]:
    """What is not averaged by an all-reduce that knows what was used; frozen ones too, which a hook may unfreeze."""
    whole = {name for unit in plan.units for name, keeps in zip(unit.params, unit.is_whole, strict=True) if keeps}
    own = {name for unit in plan.units for name in unit.params} - whole
    return {name: param for name, param in model.named_parameters() if name in own}


def _slot(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition('.')
    return model.get_submodule(path), attribute
