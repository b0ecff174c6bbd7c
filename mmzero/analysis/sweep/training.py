"""A few steps of a model: by itself, under stock DDP, or under the pair."""

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from mmengine.logging import MessageHub
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import OptimWrapper
from mmengine.runner import set_random_seed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from mmzero._compat import ddp_buffer_arguments
from mmzero.analysis.sweep.models import Case
from mmzero.wrappers import ZeroModelWrapper, ZeroOptimWrapper

STEPS = dict(equal=3, empty=2, own=2)
"""Optimizer steps, by the data."""
OPTIMIZER: dict[str, Any] = dict(lr=0.01, momentum=0.9, weight_decay=1e-4)
MAX_NORM = 1.0
_numbers = itertools.count()


@dataclass(frozen=True)
class Way:
    """One way to train.

    Args:
        wrapper (str): 'none', 'ddp' or 'zero'.
        data (str): 'equal': every rank has the same batches; 'empty': ranks have their own, those of ranks other than
            0 without objects; 'own': ranks have their own.
        stage (int): ZeRO stage, for 'zero'. Defaults to 3.
        rounding (int): Seed by which each gradient is rounded otherwise, in its last place; 0 leaves it. Defaults to 0.
    """

    wrapper: str
    data: str
    stage: int = 3
    rounding: int = 0

    def __str__(self) -> str:
        """As the name of a file."""
        stage = str(self.stage) if self.wrapper == 'zero' else ''
        return f'{self.wrapper}{stage}-{self.data}' + (f'-rounded{self.rounding}' if self.rounding else '')

    @property
    def exact(self) -> 'Way':
        """The same without other rounding."""
        return replace(self, rounding=0)


@dataclass
class Record:
    """What a training left.

    Args:
        losses (list[float]): Of this rank, by step.
        norms (list[float]): Gradient norms before clipping, by step.
        grads (dict): First gradients by name, clipped; None where there is none. Empty for equal data, and on ranks
            other than 0.
        before (dict): Weights before the first step, likewise.
        after (dict): Weights after the last step, likewise.
        buffers (dict): Buffers of rank 0 after the last step, likewise.
        numel (int): Number of parameters.
        units (int): Number of units; 0 without the pair.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    numel: int = 0
    units: int = 0


class ReferenceOptimWrapper(OptimWrapper):
    """MMEngine's, with the gradient norm summed up as two ranks do it.

    [Note: norms on CPUs]
    torch's norm of millions of float32 elements is off by 2e-5 on a CPU, that of two halves by half as much; both were
    held against float64 (ATSS: 11.85439 and 11.85451 for 11.85459). Against a norm of whole tensors every model would
    leave its bound by this alone, and clipping would carry it into the weights.

    [Note: another rounding]
    Gradients of a layer far from the loss differ by more than a unit in their last place where sums are taken in
    another order on the way (YOLACT's backbone, through a hundred batch norms: by 2e-6, in all of 348 weights).
    Backward of a loss times 1.1 rounds every number on its way otherwise, and what it gives is divided by 1.1.

    Args:
        rounding (int): Seed by which backward rounds otherwise, and each gradient is moved by up to one unit in its
            last place, as another order of sums may leave it; 0 leaves it.
        **kwargs: As MMEngine's.
    """

    def __init__(self, rounding: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._generator = torch.Generator().manual_seed(rounding) if rounding else None
        self._scale = 1 + rounding / 10

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """As MMEngine's, rounded otherwise where that is asked for; see [Note: another rounding]."""
        super().backward(loss * self._scale if self._generator is not None else loss, **kwargs)

    def _clip_grad(self) -> None:
        params = [param for group in self.optimizer.param_groups for param in group['params']]
        grads = [param.grad for param in params if param.grad is not None]
        for grad in grads if self._generator is not None else ():
            noise = torch.rand(grad.shape, generator=self._generator) * 2 - 1
            grad.div_(self._scale).mul_(1 + noise * torch.finfo(grad.dtype).eps)
        norm = get_total_norm([half for grad in grads for half in (grad.chunk(2) if grad.dim() else [grad])])
        clip_grads_with_norm_(params, MAX_NORM, norm)
        self.message_hub.update_scalar('train/grad_norm', float(norm))


def train(case: Case, way: Way) -> Record:
    """Train for a few steps with SGD, momentum and clipping. Collective, but for 'none'.

    Random states are set before each step, from the step and, where data differs, the rank.

    Args:
        case (Case): What to train.
        way (Way): How.

    Returns:
        Record: What became of it, on this rank.
    """
    hub = MessageHub.get_instance(f'sweep {next(_numbers)}')
    model = case.build()
    record = Record(numel=sum(param.numel() for param in model.parameters()))
    wrapped, optim = _wrap(model, way)
    record.units = len(wrapped.plan.units) if isinstance(wrapped, ZeroModelWrapper) else 0
    optim.message_hub = hub
    optim.initialize_count_status(wrapped, 0, STEPS[way.data])
    steps = STEPS[way.data]
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if way.data != 'equal':
        _watch(model, optim, record)
    wrapped.train()
    for step in range(steps):
        number = step if way.data == 'equal' else step * size + rank
        for name, value in dict(iter=step, epoch=0, max_iters=steps, max_epochs=1).items():
            hub.update_info(name, value)
        batch = case.batch(model, number, empty=way.data == 'empty' and rank > 0)
        set_random_seed(1000 + number)
        log_vars = wrapped.train_step(batch, optim)
        record.losses.append(float(log_vars['loss'].detach()))
        record.norms.append(float(hub.get_scalar('train/grad_norm').current()))
    if way.data != 'equal':
        record.after = _kept(model.named_parameters())
        record.buffers = _kept(model.named_buffers())
    return record


def _wrap(model: nn.Module, way: Way) -> tuple[Any, OptimWrapper]:
    if way.wrapper == 'zero':
        pair = ZeroModelWrapper(module=model, stage=way.stage, find_unused_parameters=True)
        return pair, ZeroOptimWrapper(_optimizer(pair.module), clip_grad=dict(max_norm=MAX_NORM))
    wrapped = model
    if way.wrapper == 'ddp':
        wrapped = MMDistributedDataParallel(model, find_unused_parameters=True, **ddp_buffer_arguments(False))
    return wrapped, ReferenceOptimWrapper(way.rounding, optimizer=_optimizer(model), clip_grad=dict(max_norm=MAX_NORM))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **OPTIMIZER)


def _watch(model: nn.Module, optim: OptimWrapper, record: Record) -> None:
    record.before = _kept(model.named_parameters())

    def keep(*_: Any) -> None:
        handle.remove()
        grads = _kept((name, param.grad) for name, param in model.named_parameters() if param.grad is not None)
        record.grads = {name: grads.get(name) for name, _ in model.named_parameters()}

    handle = optim.optimizer.register_step_pre_hook(keep)


def _kept(tensors: Any) -> dict[str, Tensor]:
    """Whole copies, on rank 0; the others take part in gathering alone."""
    kept = {}
    keeps = not dist.is_initialized() or dist.get_rank() == 0
    for name, tensor in tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keeps:
            kept[name] = whole.detach().clone()
    return kept
