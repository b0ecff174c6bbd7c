"""Engines that leave gradients in ``param.grad``, where torch's own optimizers and clipping find them."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer
from typing_extensions import override

from mmzero.config import LossScale
from mmzero.engines.base import Engine, assert_bound
from mmzero.engines.buffers import BufferBroadcast
from mmzero.engines.gradients import any_nonfinite, describe_nonfinite, norms_by_part
from mmzero.engines.loss_scaler import LossScaler
from mmzero.engines.options import Clip, StepOptions, StepOutcome
from mmzero.errors import ConfigError
from mmzero.policies import WrapPlan

_ALL = ''
"""The name of all parameters together, among those of parts."""


class ParamGradEngine(Engine):
    """What DDP and FSDP2 have in common: the optimizer steps on the parameters themselves."""

    scaler: LossScaler | None = None

    buffers: BufferBroadcast | None = None

    is_shared = False
    """Whether other optimizers hold some of its parameters."""

    @abstractmethod
    def shard_units(self, model: nn.Module, plan: WrapPlan) -> None:
        """Shard the units of a plan, which is the model's or one child's. Collective.

        Args:
            model (nn.Module): The model, the same on every rank, its buffers in place.
            plan (WrapPlan): The units, the outermost last.
        """

    @override
    def after_forward(self) -> None:
        if self.buffers is not None:
            # As DDP's no_sync ends: what other optimizers run through it next is no micro-batch of this one's.
            self.buffers.micro_step(is_last=True)

    def refuse_where_model_steps(self, *names: str) -> None:
        """Refuse fields that are about the forward of the whole model, where the model's own step calls its parts.

        Args:
            *names (str): Fields of the config.

        Raises:
            ConfigError: If one is set.
        """
        for name in names:
            if getattr(self.config, name):
                why = 'is for one forward per step, and here the model itself steps several optimizers; remove it'
                raise ConfigError([f'model_wrapper_cfg.{name}: {why}'])

    def watch_over(self, model: nn.Module, plan: WrapPlan) -> None:  # noqa: B027
        """Watch iterations of a whole model, of which this engine has sharded one child.

        Args:
            model (nn.Module): The model, sharded.
            plan (WrapPlan): The units of all children.
        """

    def step_of(self, optimizer: Optimizer) -> Callable[..., Any]:
        """Find the way in which an optimizer steps on parameters of this engine. Collective.

        Args:
            optimizer (Optimizer): It holds such parameters.

        Returns:
            Callable: Called with what ``Optimizer.step`` takes.

        Raises:
            ConfigError: If there is none.
        """
        return optimizer.step

    @override
    def bind(self, optimizer: Optimizer, loss_scale: LossScale | None = None) -> Optimizer:
        if loss_scale is not None:
            self.scaler = LossScaler(self.device, loss_scale, sharded=self.shards)
            self.scaler.check(optimizer)
        self._losses: list[Tensor] = []
        self._step_optimizer = self.step_of(optimizer)
        super().bind(optimizer)
        self._known = self.own_params()
        return optimizer

    @override
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        if self.optimizer is not None:
            self._losses.append(loss.detach())
        super().backward(loss if self.scaler is None else self.scaler.scale(loss), **kwargs)

    @override
    def step(self, options: StepOptions | None = None, **kwargs: Any) -> StepOutcome:
        assert_bound(self)
        options = options or StepOptions()
        own = self.own_params()
        if own != self._known:
            # A hook has added a group, whose parameters may have to be shown in another way.
            self._known = own
            self._step_optimizer = self.step_of(self.optimizer)  # type: ignore[arg-type]
        self.finish_gradients(own if self.is_shared else None)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)  # type: ignore[arg-type]
        try:
            return self._clip_and_step(options, **kwargs)
        finally:
            # After an error as well: whoever catches it may go on.
            if self.scaler is not None:
                self.scaler.update()
            self.after_step()
            self._losses.clear()
            if self.anomalies is not None:
                self.anomalies.clear()

    def _clip_and_step(self, options: StepOptions, **kwargs: Any) -> StepOutcome:
        """Step with complete gradients, or say why not."""
        params = self._with_gradients()
        norms = self._norms(params, options)
        if _ALL in norms:
            # Before they are read, so that the device goes on.
            self._clip_norm(params, options, norms[_ALL])
        found = any_nonfinite(params, self.device, self.shards) if self._looks(options, norms) else None
        values = _read(norms)
        skipped = self._why_skipped() if self._is_skipped(options, found, values.get(_ALL)) else None
        if skipped is None:
            if options.clip is not None and options.clip.by == 'value':
                for kind in self.kinds(params):
                    torch.nn.utils.clip_grad_value_(kind, **options.clip.options)
            self._step_optimizer(**kwargs)
        return StepOutcome(values.pop(_ALL, None), values, skipped)

    def _looks(self, options: StepOptions, norms: dict[str, Tensor]) -> bool:
        """Whether neither the norm nor the scaler tells if gradients are finite, and somebody wants to know."""
        return options.skip_nonfinite and self.scaler is None and _ALL not in norms

    def _is_skipped(self, options: StepOptions, found: Tensor | None, norm: float | None) -> bool:
        if self.scaler is not None and self.scaler.has_overflowed():
            return True
        if found is not None:
            return bool(found.item())
        # Of finite gradients as well, whose squares are too large. Such a norm clips nothing.
        is_wanted = options.skip_nonfinite or self.scaler is not None
        return is_wanted and norm is not None and not math.isfinite(norm)

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

    def _with_gradients(self) -> list[nn.Parameter]:
        groups = self.optimizer.param_groups  # type: ignore[union-attr]
        return [param for group in groups for param in group['params'] if param.grad is not None]

    def _norms(self, params: list[nn.Parameter], options: StepOptions) -> dict[str, Tensor]:
        """The norms before clipping that are wanted, of all parameters and of parts."""
        clip, norms = options.clip, {}
        norm_type = float(clip.options.get('norm_type', 2.0)) if clip is not None else 2.0
        if clip is not None and clip.by == 'norm' and params:
            norms[_ALL] = self.total_norm(params, norm_type, clip.options.get('foreach'))
            if clip.options.get('error_if_nonfinite') and not torch.isfinite(norms[_ALL]):
                raise RuntimeError(
                    f'the gradient norm of order {norm_type} is {float(norms[_ALL])}, so gradients cannot be clipped'
                )
        if options.parts:
            norms.update(norms_by_part(options.parts, norm_type, self.device))
        return norms

    def _clip_norm(self, params: list[nn.Parameter], options: StepOptions, norm: Tensor) -> None:
        if options.skip_nonfinite or self.scaler is not None:
            # What is skipped stays as it is, so that it can be told which gradients are not finite.
            norm = torch.where(torch.isfinite(norm), norm, torch.zeros_like(norm))
        clip: Clip = options.clip  # type: ignore[assignment]
        for kind in self.kinds(params):
            clip_grads_with_norm_(kind, clip.options['max_norm'], norm, clip.options.get('foreach'))

    def _why_skipped(self) -> str:
        own = self.own_params()
        names: Mapping[Tensor, str] = {
            param: name for name, param in self.named_params().items() if id(param) in own and param.requires_grad
        }
        why = describe_nonfinite(names, self.device, self._losses)
        return why if self.anomalies is None else f'{why}; {self.anomalies.describe()}'

    def finish_gradients(self, only: set[int] | None = None) -> None:  # noqa: B027
        """Complete what backward left open, before gradients are clipped or used. Once per step, collective.

        Args:
            only (set[int], optional): ``id`` of the parameters that step. Defaults to None: all.
        """

    def kinds(self, params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Part parameters into lists that torch's kernels for lists of tensors take.

        Args:
            params (list[nn.Parameter]): Parameters.

        Returns:
            list[list[nn.Parameter]]: All of them.
        """
        return [params]

    @abstractmethod
    def total_norm(self, params: list[nn.Parameter], norm_type: float, foreach: bool | None) -> Tensor:
        """The norm of all gradients.

        Args:
            params (list[nn.Parameter]): Parameters with a gradient on any rank.
            norm_type (float): p of the p-norm.
            foreach (bool, optional): As ``torch.nn.utils.get_total_norm``'s argument.

        Returns:
            Tensor: The norm that DDP would see, 0-dim, the same on every rank.
        """


def _read(norms: dict[str, Tensor]) -> dict[str, float]:
    """The values, read at once."""
    if len(norms) == 1:
        return {name: float(norm) for name, norm in norms.items()}
    return dict(zip(norms, torch.stack([*norms.values()]).tolist(), strict=True)) if norms else {}
