"""A small GAN of vectors, and its data: points on a circle."""

import torch
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapperDict
from mmengine.registry import DATASETS, MODELS
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import Dataset


class Block(nn.Module):
    """A residual block; a unit of the plan."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the block finds."""
        return x + self.down(torch.relu(self.up(x)))


def network(inputs: int, outputs: int, width: int, depth: int) -> nn.Module:
    """Make a generator or a discriminator."""
    blocks = [Block(width) for _ in range(depth)]
    return nn.Sequential(nn.Linear(inputs, width), *blocks, nn.Linear(width, outputs))


@MODELS.register_module()
class VectorGAN(BaseModel):
    """A GAN with the loss of Goodfellow and the R1 penalty, each network with an optimizer.

    Args:
        noise (int): Elements of the generator's input. Defaults to 8.
        width (int): Of both networks. Defaults to 32.
        depth (int): Blocks in each. Defaults to 3.
        r1 (float): Weight of the penalty on the gradient at real data. Defaults to 0.1.
    """

    def __init__(self, noise: int = 8, width: int = 32, depth: int = 3, r1: float = 0.1) -> None:
        super().__init__()
        self.noise, self.r1 = noise, r1
        self.generator = network(noise, 2, width, depth)
        self.discriminator = network(2, 1, width, depth)

    def forward(self, inputs: torch.Tensor, mode: str = 'tensor') -> list | torch.Tensor:
        """Generate as many points as there are inputs."""
        made = self.generator(torch.randn(len(inputs), self.noise, device=inputs.device))
        return list(made) if mode == 'predict' else made

    def train_step(self, data: dict, optim_wrapper: OptimWrapperDict) -> dict[str, torch.Tensor]:
        """Train the discriminator, then the generator."""
        real = self.data_preprocessor(data, True)['inputs']
        noise = torch.randn(len(real), self.noise, device=real.device)
        optim = optim_wrapper['discriminator']
        self.discriminator.requires_grad_(True)
        with optim.optim_context(self.discriminator):
            with torch.no_grad():
                fake = self.generator(noise)
            real = real.requires_grad_()
            score = self.discriminator(real)
            (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
            loss_d = softplus(-score).mean() + softplus(self.discriminator(fake)).mean()
            penalty = self.r1 * slope.square().sum(dim=1).mean()
        optim.update_params(loss_d + penalty)
        optim = optim_wrapper['generator']
        self.discriminator.requires_grad_(False)
        with optim.optim_context(self.generator):
            loss_g = softplus(-self.discriminator(self.generator(noise))).mean()
        optim.update_params(loss_g)
        return dict(loss_d=loss_d.detach(), penalty=penalty.detach(), loss_g=loss_g.detach())


@DATASETS.register_module()
class Circle(Dataset):
    """Points on a circle.

    Args:
        size (int): How many. Defaults to 256.
    """

    def __init__(self, size: int = 256) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        angle = torch.tensor(6.2832 * index / self.size)
        return dict(inputs=torch.stack([angle.cos(), angle.sin()]))
