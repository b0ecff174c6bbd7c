"""Optimizers that bite: norms, blocks, numbers in groups and random numbers, on tensors that may be shards."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Plain(Optimizer):
    """Momentum and the sign of it: each element by itself."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.01, **options: Any) -> None:
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, **options))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.prepare()
        for group in self.param_groups:
            for param in group['params']:
                if param.grad is not None:
                    param.add_(self.update(param, param.grad, group), alpha=-group['lr'])

    def prepare(self) -> None:
        """What is done once per step."""

    def momentum(self, param: Tensor, grad: Tensor) -> Tensor:
        state = self.state[param]
        if 'average' not in state:
            state['average'] = torch.zeros_like(param)
        return state['average'].mul_(0.9).add_(grad)

    def update(self, param: Tensor, grad: Tensor, group: dict) -> Tensor:
        return self.momentum(param, grad).sign() + group['weight_decay'] * param


class LambLike(Plain):
    """A norm over all gradients, summed into a plain tensor, and a ratio of norms per parameter."""

    def prepare(self) -> None:
        params = [param for group in self.param_groups for param in group['params'] if param.grad is not None]
        total = torch.zeros((), device=params[0].device)
        for param in params:
            total.add_(param.grad.pow(2).sum())
        one = torch.ones((), device=params[0].device)
        self.clip = torch.where(total.sqrt() > 0.1, total.sqrt() / 0.1, one)

    def update(self, param: Tensor, grad: Tensor, group: dict) -> Tensor:
        update = self.momentum(param, grad / self.clip) + group['weight_decay'] * param
        return update * (param.norm() / update.norm().clamp(min=1e-6))


class Projecting(Plain):
    """Takes the part along a weight out of an update where its gradient is orthogonal to it, as AdamP does."""

    def update(self, param: Tensor, grad: Tensor, group: dict) -> Tensor:
        update = self.momentum(param, grad).sign()
        if float((grad * param).sum().abs()) < 1e-5 * float(grad.norm() * param.norm()):
            update = update - param * ((update * param).sum() / param.square().sum().clamp(min=1e-12))
        return update


class Counting(Plain):
    """A step size that the group keeps, found from all gradients."""

    def prepare(self) -> None:
        for group in self.param_groups:
            total = sum(float(p.grad.abs().sum()) for p in group['params'] if p.grad is not None)
            group['distance'] = group.get('distance', 0.0) + total
            group['steps'] = group.get('steps', 0) + 1

    def update(self, param: Tensor, grad: Tensor, group: dict) -> Tensor:
        return self.momentum(param, grad) * (1 / (1 + group['distance']))


class InBlocks(Plain):
    """Momentum in 8 bit, by blocks of 256 elements with one scale each, where there are enough elements."""

    block, smallest = 256, 64

    def momentum(self, param: Tensor, grad: Tensor) -> Tensor:
        state = self.state[param]
        if param.numel() < self.smallest:
            return super().momentum(param, grad)
        if 'codes' not in state:
            blocks = -(-param.numel() // self.block)
            state['codes'] = torch.zeros(blocks, self.block, dtype=torch.int8, device=param.device)
            state['scales'] = torch.zeros(blocks, 1, device=param.device)
        codes, scales = state['codes'], state['scales']
        whole = (codes * scales).flatten()[: param.numel()].view(param.shape) * 0.9 + grad
        padded = torch.zeros(codes.numel(), device=param.device)
        padded[: param.numel()] = whole.flatten()
        padded = padded.view_as(codes)
        scales.copy_(padded.abs().amax(1, keepdim=True) / 127)
        codes.copy_((padded / scales.clamp(min=1e-12)).round())
        return whole

    def load_state_dict(self, state_dict: dict) -> None:
        # torch makes floats of it.
        super().load_state_dict(state_dict)
        for entries in self.state.values():
            if 'codes' in entries:
                entries['codes'] = entries['codes'].to(torch.int8)

    def update(self, param: Tensor, grad: Tensor, group: dict) -> Tensor:
        return self.momentum(param, grad)


class Factored(Plain):
    """Statistics of rows and columns, in the group's order of parameters, and a root of a product of matrices."""

    def update(self, param: Tensor, grad: Tensor, group: dict) -> Tensor:
        if grad.dim() < 2:
            return self.momentum(param, grad)
        state, flat = self.state[param], grad.flatten(1)
        if 'rows' not in state:
            state.update(rows=torch.zeros_like(flat[:, :1]), columns=torch.zeros_like(flat[:1]), steps=0)
        state['rows'].mul_(0.9).add_(flat.square().mean(1, keepdim=True))
        state['columns'].mul_(0.9).add_(flat.square().mean(0, keepdim=True))
        state['steps'] += 1
        scale = (state['rows'] @ state['columns'] / state['rows'].mean()).clamp(min=1e-12).rsqrt()
        return (flat * scale).view(param.shape)


class Median(Plain):
    """What needs all elements of all gradients in one vector."""

    def prepare(self) -> None:
        grads = [p.grad.flatten() for group in self.param_groups for p in group['params'] if p.grad is not None]
        self.median = torch.cat(grads).abs().median()

    def update(self, param: Tensor, grad: Tensor, group: dict) -> Tensor:
        return self.momentum(param, grad).clamp(-self.median, self.median)


class Noisy(Plain):
    """Random numbers, as stochastic rounding draws them."""

    def update(self, param: Tensor, grad: Tensor, group: dict) -> Tensor:
        return self.momentum(param, grad) + 0.1 * torch.rand_like(param)


class NeedsClosure(Plain):
    """As torch's LBFGS."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()
