"""A GAN with two optimizers, trained under MMSeparateDistributedDataParallel and under the pair."""

import copy
import itertools
import types
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from mmengine.logging import MessageHub
from mmengine.model import BaseModel, MMSeparateDistributedDataParallel
from mmengine.optim import OptimWrapper, OptimWrapperDict
from torch import nn

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero.engines.build import this_device
from tests.distributed.training import AutocastOptimWrapper, Record, full

_numbers = itertools.count()


class Layer(nn.Module):
    """A residual layer with a norm and a 0-dim parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.tensor(0.8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


class Network(nn.Module):
    """Layers between two linear ones."""

    def __init__(self, width: int, out: int, depth: int = 2) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(width, width), nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def set_requires_grad(module: nn.Module, flag: bool) -> None:
    """As mmagic's."""
    for param in module.parameters():
        param.requires_grad_(flag)


class Gan(BaseModel):
    """Trains its discriminator, then its generator, with a perceptual loss by a frozen network.

    Args:
        critics (int): The generator trains in each n-th step alone. Defaults to 1.
        toggles (bool): Freeze the discriminator while the generator trains. Defaults to True.
        backwards (int): Of the discriminator's step: one of the sum, or one per loss. Defaults to 1.
    """

    def __init__(self, critics: int = 1, toggles: bool = True, backwards: int = 1) -> None:
        super().__init__()
        self.critics, self.toggles, self.backwards, self.count = critics, toggles, backwards, 0
        self.generator, self.discriminator = Network(12, 12), Network(12, 1)
        self.perceptual = nn.Sequential(nn.Linear(12, 6), nn.Tanh()).requires_grad_(False)
        self.register_buffer('offset', torch.full((12,), 0.25))

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        out = self.generator(inputs)
        return list(out) if mode == 'predict' else out

    def train_step(self, data: dict, optim_wrapper: OptimWrapperDict) -> dict[str, torch.Tensor]:
        real = self.data_preprocessor(data, True)['inputs'] + self.offset
        noise = torch.randn_like(real)
        found = self.train_discriminator(real, noise, optim_wrapper['discriminator'])
        self.count += 1
        if self.count % self.critics == 0:
            found.update(self.train_generator(real, noise, optim_wrapper['generator']))
        return found

    def train_discriminator(self, real: torch.Tensor, noise: torch.Tensor, optim: OptimWrapper) -> dict:
        if self.toggles:
            set_requires_grad(self.discriminator, True)
        with optim.optim_context(self.discriminator):
            with torch.no_grad():
                fake = self.generator(noise)
            losses = [
                nn.functional.softplus(-self.discriminator(real)).mean(),
                nn.functional.softplus(self.discriminator(fake)).mean(),
            ]
        if self.backwards == 1:
            optim.update_params(sum(losses))
        else:
            for loss in losses:
                optim.backward(optim.scale_loss(loss))
            optim.step()
            optim.zero_grad()
        return dict(loss_d=sum(losses).detach())

    def train_generator(self, real: torch.Tensor, noise: torch.Tensor, optim: OptimWrapper) -> dict:
        if self.toggles:
            set_requires_grad(self.discriminator, False)
        with optim.optim_context(self.generator):
            fake = self.generator(noise)
            loss = nn.functional.softplus(-self.discriminator(fake)).mean()
            loss = loss + (self.perceptual(fake) - self.perceptual(real)).square().mean()
        optim.update_params(loss)
        return dict(loss_g=loss.detach())


def gan_batch(seed: int, size: int = 4) -> dict:
    """Real vectors."""
    return dict(inputs=torch.randn(size, 12, generator=torch.Generator().manual_seed(seed)))


def adams(net: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """By child."""
    generator = torch.optim.AdamW(net.generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    return dict(generator=generator, discriminator=torch.optim.AdamW(net.discriminator.parameters(), lr=2e-3))


def build_gan_pair(net: nn.Module, optimizers: Callable, wrapper: dict, optim: dict[str, dict]) -> tuple[Any, Any]:
    """Wrap a model and its optimizers, by mmzero or, where ``wrapper`` is empty, by MMEngine's separate DDP."""
    if wrapper:
        wrapped: Any = ZeroModelWrapper(module=net, **{'separate': True, **wrapper})
    else:
        wrapped = MMSeparateDistributedDataParallel(net.to(this_device()), find_unused_parameters=True)
    built = {}
    for name, optimizer in optimizers(wrapped.module).items():
        options = copy.deepcopy(optim.get(name, {}))
        stock = AutocastOptimWrapper if 'dtype' in options else OptimWrapper
        built[name] = (ZeroOptimWrapper if wrapper else stock)(optimizer, **options)
    return wrapped, OptimWrapperDict(**built)


def named(model: Any) -> dict[str, nn.Parameter]:
    """Parameters by the names that the model has without wrappers."""
    # At stages 1 and 2 a network that ran last is gathered.
    model.module.state_dict()
    return {name.replace('.module.', '.'): param for name, param in model.module.named_parameters()}


def train_gan(
    build: Callable[[], nn.Module],
    wrapper: dict | None = None,
    optim: dict[str, dict] | None = None,
    steps: int = 5,
    seed: int = 0,
    optimizers: Callable = adams,
    scheduler: Callable[[OptimWrapperDict], list] | None = None,
) -> Record:
    """Train and record what :func:`tests.distributed.training.compare` wants."""
    torch.manual_seed(seed)
    model, wrapped = build_gan_pair(build(), optimizers, wrapper or {}, optim or {})
    record: Record = dict(losses=[], norms=[], grads={}, skips=[])
    for name, one in wrapped.items():
        one.message_hub = MessageHub(f'gan {next(_numbers)}')
        one.initialize_count_status(model, 0, steps)
        _record_steps(record, model, name, one)
    record['before'] = {name: full(param) for name, param in named(model).items()}
    schedulers = scheduler(wrapped) if scheduler else []
    model.train()
    rank, size = dist.get_rank(), dist.get_world_size()
    for index in range(steps):
        torch.manual_seed(1000 * (seed + 1) + index * size + rank)
        logs = model.train_step(gan_batch(1000 * seed + index * size + rank), wrapped)
        record['losses'] += [float(value) for value in logs.values()]
        for one in schedulers:
            one.step()
    record['after'] = {name: full(param) for name, param in named(model).items()}
    record['buffers'] = {n.replace('.module.', '.'): full(buffer) for n, buffer in model.module.named_buffers()}
    record['grads'] = {name: record['grads'].get(name) for name in record['before']}
    record['lr'] = wrapped.get_lr()
    return record


def _record_steps(record: Record, model: Any, key: str, optim: OptimWrapper) -> None:
    step, seen = optim.step, []
    # While it steps, the optimizer sees others in their place.
    own = {id(param) for group in optim.optimizer.param_groups for param in group['params']}

    def keep_gradients(*_: Any) -> None:
        if not seen:
            seen.append(key)
            for name, param in named(model).items():
                if id(param) in own:
                    record['grads'][name] = None if param.grad is None else full(param.grad)

    def step_and_keep_norm(_: OptimWrapper, **kwargs: Any) -> None:
        step(**kwargs)
        if 'train/grad_norm' in optim.message_hub.log_scalars:
            record['norms'].append(float(optim.message_hub.get_scalar('train/grad_norm').current()))

    optim.optimizer.register_step_pre_hook(keep_gradients)
    optim.step = types.MethodType(step_and_keep_norm, optim)


class Averaging(OptimWrapper):
    """What is right whatever the model does: gradients are averaged once, when they are complete."""

    def step(self, **kwargs: Any) -> None:
        for param in (param for group in self.optimizer.param_groups for param in group['params']):
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        super().step(**kwargs)


class Bare(nn.Module):
    """A model that nothing synchronises."""

    def __init__(self, module: nn.Module, **_: Any) -> None:
        super().__init__()
        self.module = module

    def train_step(self, *args: Any) -> Any:
        return self.module.train_step(*args)


def train_by_hand(*args: Any, **kwargs: Any) -> Record:
    """As :func:`train_gan` without DDP, by :class:`Averaging`."""
    stock = dict(MMSeparateDistributedDataParallel=Bare, OptimWrapper=Averaging)
    with patch.multiple('tests.distributed.gan', **stock):
        return train_gan(*args, **kwargs)


class Penalised(Gan):
    """With a penalty on the gradient between real and fake, as WGAN-GP, and on that at real ones by itself, as R1."""

    def train_discriminator(self, real: torch.Tensor, noise: torch.Tensor, optim: OptimWrapper) -> dict:
        set_requires_grad(self.discriminator, True)
        with optim.optim_context(self.discriminator):
            with torch.no_grad():
                fake = self.generator(noise)
            slope = self.slope(real + 0.3 * (fake - real))
            fit = nn.functional.softplus(-self.discriminator(real)) + nn.functional.softplus(self.discriminator(fake))
            loss = fit.mean() + (slope.norm(dim=1) - 1).square().mean()
        optim.backward(optim.scale_loss(loss))
        with optim.optim_context(self.discriminator):
            lazy = self.slope(real).square().sum(dim=1).mean()
        optim.backward(optim.scale_loss(lazy))
        optim.step()
        optim.zero_grad()
        return dict(loss_d=loss.detach(), lazy=lazy.detach())

    def slope(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.discriminator(x).sum(), x, create_graph=True)[0]


class Straight(Layer):
    """A residual layer whose derivative depends on its weights alone."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        del self.norm, self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x))


class PenalisedAlone(Gan):
    """The penalty has a backward of its own, which does not come by what the forward noted: only by weights."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator = nn.Sequential(Straight(12), Straight(12), nn.Linear(12, 1))

    def train_discriminator(self, real: torch.Tensor, noise: torch.Tensor, optim: OptimWrapper) -> dict:
        set_requires_grad(self.discriminator, True)
        with optim.optim_context(self.discriminator):
            real = real.detach().requires_grad_()
            score = self.discriminator(real)
            slope = torch.autograd.grad(score.sum(), real, create_graph=True)[0]
            losses = [nn.functional.softplus(-self.discriminator(real)).mean(), slope.square().sum(1).mean()]
        for loss in losses:
            optim.backward(optim.scale_loss(loss))
        optim.step()
        optim.zero_grad()
        return dict(loss_d=sum(losses).detach())


class Peeking(Gan):
    """Looks at its networks without a backward, around steps, and freezes them while they are gathered."""

    def train_discriminator(self, real: torch.Tensor, noise: torch.Tensor, optim: OptimWrapper) -> dict:
        with optim.optim_context(self.discriminator):
            with torch.no_grad():
                fake = self.generator(noise)
            loss = nn.functional.softplus(-self.discriminator(real)) + nn.functional.softplus(self.discriminator(fake))
            loss = loss.mean()
        optim.backward(optim.scale_loss(loss))
        with torch.no_grad():
            self.discriminator(real)
        optim.step()
        optim.zero_grad()
        with torch.no_grad():
            seen = self.discriminator(real).mean()
        # Gathered at stages 1 and 2. What is frozen here is called first once that was dropped.
        set_requires_grad(self.discriminator, False)
        self.state_dict()
        return dict(loss_d=loss.detach(), seen=seen)

    def train_generator(self, real: torch.Tensor, noise: torch.Tensor, optim: OptimWrapper) -> dict:
        found = super().train_generator(real, noise, optim)
        with torch.no_grad():
            self.discriminator(real)
        set_requires_grad(self.discriminator, True)
        self.state_dict()
        return found
