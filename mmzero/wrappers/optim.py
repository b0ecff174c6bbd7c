"""The optimizer wrapper."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from torch import Tensor, nn
from torch.optim import Optimizer

from mmzero.config import LossScale, Reader, read_loss_scale
from mmzero.config.reader import optional_dtype
from mmzero.config.step import DEFAULT_MAX_SKIPS, GROUPS, read_grad_norms, read_max_skips
from mmzero.engines import Clip, StepOptions, Training, engine_for
from mmzero.errors import ConfigError
from mmzero.wrappers.parts import parts_of
from mmzero.wrappers.skips import SkippedSteps


@OPTIM_WRAPPERS.register_module()
class ZeroOptimWrapper(OptimWrapper):
    """MMEngine's optimizer wrapper over an engine: clipping, accumulation and mixed precision as under DDP.

    Args:
        optimizer (Optimizer): Built on the parameters of a ZeroModelWrapper, on all of them or on some: several
            optimizers make an ``OptimWrapperDict``, for a model with a ``train_step`` of its own.
        accumulative_counts (int): Micro-batches per optimizer step. Defaults to 1.
        clip_grad (dict, optional): Arguments of ``torch.nn.utils.clip_grad_norm_``, or with ``type='value'`` of
            ``clip_grad_value_``. Defaults to None.
        dtype (str or torch.dtype, optional): 'bfloat16' or 'float16' runs the forward under autocast. Defaults to
            None: float32.
        loss_scale (str or float or dict, optional): How the loss is scaled in float16: 'dynamic', a fixed scale, or
            arguments of ``torch.amp.GradScaler``. Defaults to None: 'dynamic' in float16, none otherwise.
        max_skips (int, optional): A step for which a gradient of any rank is not finite is skipped on all ranks, and
            told; more than this many in a row end the run. None: gradients are not looked at and nan goes into the
            weights, as under DDP, but for float16, where any number of steps is skipped. Defaults to 20.
        grad_norms (str or Sequence[str], optional): Parts of the model whose gradient norms are logged besides the
            whole one's, as ``grad_norm/PART``: patterns on names of modules or parameters, or 'groups' for the
            optimizer's groups. Defaults to None.

    Raises:
        ConfigError: If the optimizer was not built on parameters of one ZeroModelWrapper, the dtype is not
            supported, autocast would run over fp32 units at stage 3, the engine cannot clip so, a scale is given
            for another dtype than float16, or a part has no parameters.
    """

    is_stand_in = False
    """Whether the batch is one that does not count, so that gradients are zeros."""

    path = 'optim_wrapper'
    """Where it is in the config."""

    def __init__(
        self,
        optimizer: Optimizer,
        accumulative_counts: int = 1,
        clip_grad: dict | None = None,
        dtype: str | torch.dtype | None = None,
        loss_scale: str | float | dict | None = None,
        max_skips: int | None = DEFAULT_MAX_SKIPS,
        grad_norms: str | Sequence[str] | None = None,
    ) -> None:
        self.engine = engine_for(param for group in optimizer.param_groups for param in group['params'])
        self.dtype = _read('dtype', dtype, optional_dtype)
        self.engine.check_autocast(self.dtype)
        scale = _loss_scale(loss_scale, self.dtype)
        if type(self)._clip_grad is not OptimWrapper._clip_grad:
            raise ConfigError(
                [
                    f'optim_wrapper.type: {type(self).__name__} overrides _clip_grad, which is never called, since the '
                    'engine clips; override step, or the optimizer'
                ]
            )
        # MMEngine takes 'type' out of the dict that it is given.
        clip_grad = None if clip_grad is None else dict(clip_grad)
        super().__init__(optimizer, accumulative_counts, clip_grad)
        self.engine.check_clip(self._clip())
        self.max_skips = _read('max_skips', max_skips, read_max_skips)
        if self.max_skips is None and scale is None and self.engine.anomalies is not None:
            raise ConfigError(
                [
                    'optim_wrapper.max_skips: got None, with which nothing looks whether gradients are finite; '
                    'model_wrapper_cfg.detect_anomaly=True needs a number'
                ]
            )
        self.grad_norms = _read('grad_norms', grad_norms, read_grad_norms)
        self.parts = self._parts(optimizer, self.grad_norms)
        self.skips = SkippedSteps(self.max_skips, scale is not None, self.engine.anomalies is not None)
        settings = dict(optimizer.defaults, type=type(optimizer).__name__)
        self.engine.check_training(
            Training(
                micro_batches=accumulative_counts,
                clip=self._clip(),
                dtype=self.dtype,
                loss_scale=scale,
                optimizer=settings,
                batch_size=self.engine.batch_size,
                world_size=dist.get_world_size(),
            )
        )
        self.optimizer = self.engine.bind(optimizer, scale)

    def _parts(self, optimizer: Optimizer, wanted: Sequence[str]) -> dict[str, list[nn.Parameter]]:
        own = {param for group in optimizer.param_groups for param in group['params']}
        named = [(name, param) for name, param in self.engine.named_params().items() if param in own]
        try:
            return parts_of(named, optimizer.param_groups, wanted)
        except ValueError as error:
            raise ConfigError([f'optim_wrapper.grad_norms: {error}']) from None

    def be_one_of_several(self, path: str) -> None:
        """Tell and log things under a name of its own.

        Args:
            path (str): Where it is in the config.
        """
        if path == self.path:
            return
        self.path = path
        if tuple(self.grad_norms) == (GROUPS,):
            # Others have groups of the same numbers.
            self.parts = {f'{path.rpartition(".")[2]}.{part}': params for part, params in self.parts.items()}

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Prepare one micro-batch: gradient synchronisation by the stage's rules, and autocast.

        Args:
            model (nn.Module): The model wrapper.

        Yields:
            None: The forward runs inside.
        """
        self.engine.micro_step(self.should_sync())
        has_autocast = self.dtype not in (None, torch.float32)
        with torch.autocast(self.engine.device.type, dtype=self.dtype) if has_autocast else nullcontext():
            yield
        for part in self.engine.parts:
            part.after_forward()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward.

        Args:
            loss (Tensor): The loss, divided by the number of micro-batches.
            **kwargs: As ``torch.Tensor.backward``.
        """
        self.engine.backward(0 * loss if self.is_stand_in else loss, **kwargs)
        self._inner_count += 1

    def step(self, **kwargs: Any) -> None:
        """Clip the gradients and step the optimizer; nothing moves where a gradient of any rank is not finite.

        Args:
            **kwargs: As ``torch.optim.Optimizer.step``.

        Raises:
            NonFiniteError: If more steps than ``max_skips`` in a row were skipped.
        """
        options = StepOptions(self._clip(), self.max_skips is not None, self.parts)
        outcome = self.engine.step(options, **kwargs)
        if outcome.skipped is not None:
            scale = self.engine.scaler_state().get('scale')
            self.skips.skipped(outcome.skipped, scale, self.message_hub, self.path)
            return
        self.skips.done()
        # Those of a step that is skipped would make the mean that is logged infinite for many.
        if outcome.norm is not None:
            self.message_hub.update_scalar('train/grad_norm', outcome.norm)
        for name, norm in outcome.norms.items():
            self.message_hub.update_scalar(f'train/grad_norm/{name}', norm)

    def _clip(self) -> Clip | None:
        # Read anew each time: hooks may change clip_grad_kwargs during a run.
        if not self.clip_grad_kwargs:
            return None
        return Clip('value' if self.grad_name == 'grad_value' else 'norm', self.clip_grad_kwargs)

    def state_dict(self) -> dict:
        """Gather the optimizer's state. Collective.

        Returns:
            dict: On rank 0 the state of the unsharded optimizer and of the loss scale, as MMEngine saves them; empty
                on other ranks.
        """
        state = self.engine.optimizer_state()
        if state and self.base_param_settings is not None:
            state['base_param_settings'] = self.base_param_settings
        scaler = self.engine.scaler_state()
        if state and scaler:
            state['loss_scaler'] = scaler
        return state

    def shards(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Take the optimizer's state apart, for a checkpoint of which each rank writes its shards. Collective.

        Returns:
            tuple[dict[str, Tensor], dict]: Shards by name, and the rest.
        """
        shards, rest = self.engine.optimizer_shards()
        scaler = self.engine.scaler_state()
        rest |= dict(loss_scaler=scaler) if scaler else {}
        rest |= {} if self.base_param_settings is None else dict(base_param_settings=self.base_param_settings)
        return shards, rest

    def load_state_dict(self, state_dict: dict) -> None:
        """Load the optimizer's state from rank 0's, or by shards. Collective.

        Args:
            state_dict (dict): As :meth:`state_dict` gives it on rank 0; on other ranks its tensors are not used. Or the
                rest that :meth:`shards` gave, the same on every rank, with what reads shards by name as
                ``load_shards``.
        """
        state = dict(state_dict)
        settings = state.pop('base_param_settings', None)
        if settings is not None:
            self.base_param_settings = settings
        load = state.pop('load_shards', None)
        if load is not None:
            scale = state.pop('loss_scaler', None)
            self.engine.load_optimizer_shards(state, load)
            if scale:
                self.engine.load_scaler_state(scale)
            return
        # Other ranks may have been given nothing.
        scaler = [state.pop('loss_scaler', None)]
        self.engine.load_optimizer_state(state)
        dist.broadcast_object_list(scaler, src=0)
        if scaler[0]:
            self.engine.load_scaler_state(scaler[0])


def _read(name: str, value: Any, read: Reader) -> Any:
    try:
        return read(value)
    except ValueError as error:
        raise ConfigError([f'optim_wrapper.{name}: got {value!r}; {error}']) from None


def _loss_scale(given: Any, dtype: torch.dtype | None) -> LossScale | None:
    """The scale of float16; None for other dtypes."""
    if dtype != torch.float16:
        if given is not None:
            raise ConfigError(
                [
                    f'optim_wrapper.loss_scale: got {given!r} for {dtype or "float32"}, which needs none; '
                    "remove it, or set dtype='float16'"
                ]
            )
        return None
    try:
        return read_loss_scale(given)
    except ValueError as error:
        raise ConfigError([f'optim_wrapper.loss_scale: got {given!r}; {error}']) from None
