"""Engines that leave gradients in ``param.grad``, where torch's own optimizers and clipping find them."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from mmzero.config import LossScale
from mmzero.engines.base import Clip, Engine, assert_bound
from mmzero.engines.loss_scaler import LossScaler
from mmzero.policies import WrapPlan


class ParamGradEngine(Engine):
    """What DDP and FSDP2 have in common: the optimizer steps on the parameters themselves."""

    scaler: LossScaler | None = None

    is_shared = False
    """Whether other optimizers hold some of its parameters."""

    @abstractmethod
    def shard_units(self, model: nn.Module, plan: WrapPlan) -> None:
        """Shard the units of a plan, which is the model's or one child's. Collective.

        Args:
            model (nn.Module): The model, the same on every rank, its buffers in place.
            plan (WrapPlan): The units, the outermost last.
        """

    def watch_over(self, model: nn.Module, plan: WrapPlan) -> None:  # noqa: B027
        """Watch iterations of a whole model, of which this engine has sharded one child.

        Args:
            model (nn.Module): The model, sharded.
            plan (WrapPlan): The units of all children.
        """

    def suit(self, optimizer: Optimizer) -> None:  # noqa: B027
        """Change options of an optimizer's groups that parameters of this engine cannot have.

        Args:
            optimizer (Optimizer): It holds such parameters.
        """

    @override
    def bind(self, optimizer: Optimizer, loss_scale: LossScale | None = None) -> Optimizer:
        if loss_scale is not None:
            self.scaler = LossScaler(self.device, loss_scale, sharded=self.shards)
            self.scaler.check(optimizer)
        return super().bind(optimizer)

    @override
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        super().backward(loss if self.scaler is None else self.scaler.scale(loss), **kwargs)

    @override
    def step(self, clip: Clip | None = None, **kwargs: Any) -> Tensor | None:
        assert_bound(self)
        self.finish_gradients(self.own_params() if self.is_shared else None)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)  # type: ignore[arg-type]
        norm = None if clip is None else self._clip(clip)
        if self.scaler is None or not self.scaler.has_overflowed():
            self.optimizer.step(**kwargs)  # type: ignore[union-attr]
        if self.scaler is not None:
            self.scaler.update()
        self.after_step()
        return norm

    def params(self) -> list[nn.Parameter]:
        """The parameters that this engine has sharded."""
        raise RuntimeError('no parameter was sharded yet')

    def own_params(self) -> set[int]:
        """``id`` of the parameters that the bound optimizer holds."""
        groups = self.optimizer.param_groups  # type: ignore[union-attr]
        return {id(param) for group in groups for param in group['params']}

    def after_step(self) -> None:  # noqa: B027
        """Be told that the optimizer has moved parameters."""

    @override
    def scaler_state(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    @override
    def load_scaler_state(self, state: dict[str, Any]) -> None:
        if self.scaler is not None:
            self.scaler.load_state_dict(state)

    def _clip(self, clip: Clip) -> Tensor | None:
        groups = self.optimizer.param_groups  # type: ignore[union-attr]
        params = [param for group in groups for param in group['params'] if param.grad is not None]
        if not params:
            return None
        if clip.by == 'value':
            self.clip_value(params, **clip.options)
            return None
        return self.clip_norm(params, **clip.options)

    def finish_gradients(self, only: set[int] | None = None) -> None:  # noqa: B027
        """Complete what backward left open, before gradients are clipped or used. Once per step, collective.

        Args:
            only (set[int], optional): ``id`` of the parameters that step. Defaults to None: all.
        """

    def clip_value(self, params: list[nn.Parameter], **kwargs: Any) -> None:
        """Clip each element of the gradients.

        Args:
            params (list[nn.Parameter]): Parameters with a gradient on any rank.
            **kwargs: ``clip_value`` and the rest of ``torch.nn.utils.clip_grad_value_``.
        """
        torch.nn.utils.clip_grad_value_(params, **kwargs)

    @abstractmethod
    def clip_norm(self, params: list[nn.Parameter], **kwargs: Any) -> Tensor:
        """Clip gradients by their global norm.

        Args:
            params (list[nn.Parameter]): Parameters with a gradient on any rank.
            **kwargs: ``max_norm``, ``norm_type`` and the rest of ``torch.nn.utils.clip_grad_norm_``.

        Returns:
            Tensor: The norm before clipping that DDP would see, 0-dim, the same on every rank.
        """
