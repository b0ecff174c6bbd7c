"""A vision transformer to measure with: MMEngine's BaseModel, needs no data set and no other package."""

from typing import Any

import torch
from mmengine.model import BaseModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention


class ViTBlock(nn.Module):
    """Attention and MLP, each after a norm and around a residual.

    Args:
        width (int): Channels.
        heads (int): Attention heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Transform tokens.

        Args:
            x (Tensor): Of shape (batch, tokens, width).

        Returns:
            Tensor: Of the same shape.
        """
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        attended = scaled_dot_product_attention(query, key, value)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ViT(BaseModel):
    """A classifier of images (Dosovitskiy et al., 2021, with mean pooling).

    Args:
        width (int): Channels. Defaults to 192, of ViT-Tiny.
        depth (int): Blocks. Defaults to 8.
        heads (int): Attention heads. Defaults to 3.
        image_size (int): Pixels of a side. Defaults to 32.
        patch_size (int): Pixels of a patch's side. Defaults to 8.
        classes (int): Classes. Defaults to 100.
    """

    def __init__(
        self,
        width: int = 192,
        depth: int = 8,
        heads: int = 3,
        image_size: int = 32,
        patch_size: int = 8,
        classes: int = 100,
    ) -> None:
        super().__init__()
        self.image_size, self.classes = image_size, classes
        self.patches = nn.Conv2d(3, width, patch_size, stride=patch_size)
        self.position = nn.Parameter(0.02 * torch.randn(1, (image_size // patch_size) ** 2, width))
        self.blocks = nn.ModuleList(ViTBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: Tensor, labels: Tensor | None = None, mode: str = 'tensor') -> Any:
        """Run the model in one of MMEngine's modes.

        Args:
            inputs (Tensor): Images, of shape (batch, 3, image_size, image_size).
            labels (Tensor, optional): Classes, of shape (batch,); for 'loss'. Defaults to None.
            mode (str): 'tensor', 'loss' or 'predict'. Defaults to 'tensor'.

        Returns:
            Tensor or dict or list: Logits, the loss by its name, or logits image by image.
        """
        x = self.patches(inputs).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x).mean(1))
        if mode == 'loss':
            return dict(loss=cross_entropy(logits, labels))  # type: ignore[arg-type]
        return list(logits) if mode == 'predict' else logits

    def batch(self, seed: int, size: int) -> dict[str, Tensor]:
        """Make a batch of noise.

        Args:
            seed (int): Of the noise.
            size (int): Images.

        Returns:
            dict[str, Tensor]: Arguments of :meth:`forward`, on the CPU.
        """
        generator = torch.Generator().manual_seed(seed)
        shape = (size, 3, self.image_size, self.image_size)
        labels = torch.randint(self.classes, (size,), generator=generator)
        return dict(inputs=torch.randn(shape, generator=generator), labels=labels)
