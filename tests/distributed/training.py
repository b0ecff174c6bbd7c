"""The same training under stock DDP and under the pair, recorded for comparison."""

import copy
import itertools
import math
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from mmengine.logging import MessageHub
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import OptimWrapper
from torch import nn
from torch.distributed.tensor import DTensor

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero.engines.build import this_device

Record = dict[str, Any]

# Elements of a gradient below this share of the tensor's root mean square are taken for rounding noise.
NOISE = 1e-4
_numbers = itertools.count()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, gathered if it is a shard."""
    if hasattr(tensor, 'ds_id') or hasattr(tensor, '_hp_mapping'):
        return _full_of_deepspeed(tensor)
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone()


def _full_of_deepspeed(param: Any) -> torch.Tensor:
    """A trained parameter is what the optimizer steps; under 16 bit the model has rounded copies."""
    import deepspeed

    if param.requires_grad:
        return deepspeed.utils.safe_get_full_fp32_param(param).clone()
    with deepspeed.zero.GatheredParameters([param]):
        return param.detach().clone()


def _keep_gradients_of_deepspeed(engine: Any, params: dict[str, Any], record: Record) -> None:
    """Read gradients before its first step, which clips them; clip them here as torch would."""
    from deepspeed.utils import safe_get_full_grad

    step = engine.step

    def keep_and_step(options: Any = None, **kwargs: Any) -> Any:
        if record['grads']:
            return step(options, **kwargs)
        scale = getattr(engine.zero, 'loss_scale', 1.0)
        grads = {n: safe_get_full_grad(p).float() / scale if p.requires_grad else None for n, p in params.items()}
        outcome = step(options, **kwargs)
        factor = 1.0
        if options.clip is not None and outcome.norm is not None:
            factor = min(1.0, options.clip.options['max_norm'] / (outcome.norm + 1e-6))
        record['grads'] = {name: None if grad is None else grad * factor for name, grad in grads.items()}
        return outcome

    engine.step = keep_and_step


class AutocastOptimWrapper(OptimWrapper):
    """What a user writes by hand for 16 bit under DDP, since AmpOptimWrapper wants a GPU."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, dtype: str, loss_scale: dict | None = None, **kwargs: Any
    ) -> None:
        super().__init__(optimizer, **kwargs)
        self.dtype = getattr(torch, dtype)
        self.scaler = torch.amp.GradScaler(this_device().type, enabled=dtype == 'float16', **(loss_scale or {}))

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        super().backward(self.scaler.scale(loss), **kwargs)

    def step(self, **kwargs: Any) -> None:
        self.scaler.unscale_(self.optimizer)
        if self.clip_grad_kwargs:
            self._clip_grad()
        self.scaler.step(self.optimizer, **kwargs)
        self.scaler.update()

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        with super().optim_context(model), torch.autocast(this_device().type, dtype=self.dtype):
            yield


def build_pair(
    model: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer], wrapper: dict, optim: dict
) -> tuple[nn.Module, OptimWrapper]:
    """Wrap a model and its optimizer, by mmzero or, where ``wrapper`` is empty, by stock DDP."""
    if wrapper:
        wrapped: nn.Module = ZeroModelWrapper(module=model, **wrapper)
        return wrapped, ZeroOptimWrapper(optimizer(wrapped.module), **optim)
    device = this_device()
    wrapped = MMDistributedDataParallel(
        model.to(device),
        device_ids=[device] if device.type == 'cuda' else None,
        broadcast_buffers=False,
        find_unused_parameters=True,
    )
    cls = AutocastOptimWrapper if 'dtype' in optim else OptimWrapper
    return wrapped, cls(optimizer(wrapped.module), **optim)


def train(
    build: Callable[[], nn.Module],
    batch: Callable[[int], dict],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    wrapper: dict | None = None,
    optim: dict | None = None,
    steps: int = 5,
    seed: int = 0,
    scheduler: Callable[[OptimWrapper], Any] | None = None,
) -> Record:
    """Train for some micro-batches and record losses, gradient norms, first gradients and weights.

    Every rank gets its own data; the random state of each step is set, so that noise does not depend on the engine.
    """
    torch.manual_seed(seed)
    hub = MessageHub(f'training {next(_numbers)}')
    # MMEngine takes keys out of the dicts that it is given.
    model, wrapped_optim = build_pair(build(), optimizer, wrapper or {}, copy.deepcopy(optim or {}))
    wrapped_optim.message_hub = hub
    wrapped_optim.initialize_count_status(model, 0, steps)
    # Asked once: while a unit is gathered, the model lists others.
    params = dict(model.module.named_parameters())
    record: Record = dict(losses=[], norms=[], grads={}, before={}, after={})
    record['before'] = {name: full(param) for name, param in model.module.named_parameters()}
    rank, size = dist.get_rank(), dist.get_world_size()
    step = wrapped_optim.step

    def keep_gradients(*_: Any) -> None:
        # Called once gradients are complete and clipped.
        if not record['grads']:
            for name, param in params.items():
                record['grads'][name] = None if param.grad is None else full(param.grad)

    def step_and_keep_norm(_: OptimWrapper, **kwargs: Any) -> None:
        step(**kwargs)
        if 'train/grad_norm' in hub.log_scalars:
            record['norms'].append(float(hub.get_scalar('train/grad_norm').current()))

    if wrapper and getattr(model.engine, 'runtime', None) is not None:
        _keep_gradients_of_deepspeed(model.engine, params, record)
    else:
        wrapped_optim.optimizer.register_step_pre_hook(keep_gradients)
    # A bound method, as schedulers want it.
    wrapped_optim.step = types.MethodType(step_and_keep_norm, wrapped_optim)
    schedule = scheduler(wrapped_optim) if scheduler else None
    model.train()
    for index in range(steps):
        torch.manual_seed(1000 * (seed + 1) + index)
        log_vars = model.train_step(batch(1000 * seed + index * size + rank), wrapped_optim)
        record['losses'].append(float(log_vars['loss'].detach()))
        if schedule is not None:
            schedule.step()
    record['after'] = {name: full(param) for name, param in model.module.named_parameters()}
    record['buffers'] = {name: full(buffer) for name, buffer in model.module.named_buffers()}
    return record


def compare(found: Record, reference: Record) -> dict[str, float]:
    """Measure the distances of the design's table "Equal to what, within what"."""
    assert found['grads'].keys() == reference['grads'].keys()
    missing = [n for n, g in found['grads'].items() if (g is None) != (reference['grads'][n] is None)]
    assert not missing, f'gradients on one side only: {missing}'
    grads = {name: grad for name, grad in reference['grads'].items() if grad is not None}
    total = torch.stack([grad.norm() for grad in grads.values()]).norm()
    real = {name: _real(grad) for name, grad in grads.items()}
    moved = {name: (reference['after'][name] - reference['before'][name])[real[name]] for name in grads}
    off = {name: (found['after'][name] - reference['after'][name])[real[name]] for name in grads}
    for run in (found, reference):
        numbers = [*run['losses'], *run['norms'], *(tensor.sum() for tensor in run['after'].values())]
        assert all(math.isfinite(number) for number in numbers), 'a loss, norm or weight is not finite'
    # Noise moves a weight by no more than others move, and buffers are the same.
    largest = max(float(values.abs().max()) for values in moved.values() if values.numel())
    for name in grads:
        noise = (found['after'][name] - reference['after'][name])[~real[name]]
        assert not noise.numel() or float(noise.abs().max()) <= 3 * largest, f'{name}: an element without a gradient'
    for name, buffer in reference['buffers'].items():
        torch.testing.assert_close(found['buffers'][name], buffer, rtol=1e-6, atol=0, msg=f'buffer {name}')
    still = [name for name in reference['before'] if name not in grads]
    assert all(torch.equal(found['after'][name], reference['after'][name]) for name in still), still
    return dict(
        loss=max(_relative(a, b) for a, b in zip(found['losses'], reference['losses'], strict=True)),
        norm=max([0.0, *(_relative(a, b) for a, b in zip(found['norms'], reference['norms'], strict=True))]),
        grad=max(
            float((found['grads'][name] - grad).norm() / (grad.norm() + 1e-1 * total)) for name, grad in grads.items()
        ),
        update=float(_norm(off) / _norm(moved)),
        tensor=max(float(off[name].norm() / moved[name].norm()) for name in grads if moved[name].norm()),
    )


def distance(found: Record, reference: Record) -> dict[str, float]:
    """Measure how far a trajectory is off as a whole, for runs in another precision."""
    names = [name for name, grad in reference['grads'].items() if grad is not None]
    pairs = {
        'loss': (found['losses'], reference['losses']),
        'norm': (found['norms'], reference['norms']),
        'grad': ([found['grads'][name] for name in names], [reference['grads'][name] for name in names]),
        'update': [[run['after'][name] - run['before'][name] for name in names] for run in (found, reference)],
    }
    return {what: _distance(*pair) for what, pair in pairs.items()}


def _distance(found: list, reference: list) -> float:
    ours, theirs = (torch.cat([torch.as_tensor(x).double().flatten() for x in values]) for values in (found, reference))
    return float((ours - theirs).norm() / theirs.norm())


def _real(grad: torch.Tensor) -> torch.Tensor:
    """Where a gradient is more than noise.

    Adam normalises any gradient to a full step, also what rounding left of one that is truly zero: that of a key's bias
    before a softmax, which may be a third of a tensor. Such weights differ between two runs of stock DDP, too.
    """
    return grad.abs() >= NOISE * grad.square().mean().sqrt()


def _relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), 1e-12)


def _norm(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.norm() for tensor in tensors.values()]).norm()
