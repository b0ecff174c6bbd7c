"""Models whose classes and layouts occur nowhere in mmzero, for policies that must not know names."""

import torch
from mmengine.model import BaseModel
from torch import nn


class Pleat(nn.Module):
    """A block of two weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.push = nn.Linear(width, 3 * width)
        self.pull = nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.pull(torch.relu(self.push(x)))


class WidePleat(nn.Module):
    """A first block, of another class."""

    def __init__(self, into: int, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(into, width)
        self.pleat = Pleat(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pleat(self.into(x))


class Judge(nn.Module):
    """A head: entered by its loss, with layers of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tower = nn.ModuleList(Pleat(width) for _ in range(2))
        self.out = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.tower:
            x = layer(x)
        return self.out(x)

    def loss(self, x: torch.Tensor) -> dict:
        return dict(loss=self(x).square().mean())


class Regions(nn.Module):
    """A head that works on regions, of which a rank may find none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cut = nn.Identity()
        self.cut.roi_layers = []
        self.judge = Judge(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.judge(self.cut(x))

    def loss(self, x: torch.Tensor) -> dict:
        return dict(loss=self(x).sum())


class Bellows(BaseModel):
    """Blocks as plain attributes, no list; a head; experts of which the data pick one."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.mouth = nn.Linear(4, width)
        self.north, self.east, self.south = Pleat(width), Pleat(width), Pleat(width)
        self.choir = nn.ModuleList(Pleat(width) for _ in range(4))
        self.judge = Judge(width)

    def forward(self, inputs: torch.Tensor, data_samples: object = None, mode: str = 'tensor') -> object:
        x = self.mouth(inputs)
        for name in ('north', 'east', 'south'):
            x = getattr(self, name)(x)
        singer = int(x.sum().item()) % 4
        x = self.choir[singer](x)
        return self.judge.loss(x) if mode == 'loss' else self.judge(x)


class Ring(nn.Module):
    """A stage of a chain of blocks, the first of another class; the last layer may be dropped at random."""

    def __init__(self, into: int, width: int, depth: int, drop: float) -> None:
        super().__init__()
        self.beads = nn.ModuleList([WidePleat(into, width), *(Pleat(width) for _ in range(depth))])
        self.extra = nn.ModuleList(WidePleat(width, width) for _ in range(2))
        self.drop = drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(len(self.beads)):
            bead = self.beads[index]
            x = bead(x)
        for one in self.extra:
            draw = torch.rand(())
            if self.training and draw < self.drop:
                continue
            x = one(x)
        return x


class Necklace(nn.Module):
    """Stages of growing width in a dict."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.rings = nn.ModuleDict(dict(a=Ring(4, 8, 2, drop), b=Ring(8, 16, 5, drop), c=Ring(16, 24, 2, drop)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for ring in self.rings.values():
            x = ring(x)
        return x


def fold(width: int) -> nn.Sequential:
    """A block that is a plain Sequential."""
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


class Fan(nn.Module):
    """Blocks without a class of their own; two of them share a weight; words that go in and come out share theirs."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(11, width)
        self.folds = nn.ModuleList(fold(width) for _ in range(5))
        self.folds[4][1].weight = self.folds[3][1].weight
        self.speak = nn.Linear(width, 11, bias=False)
        self.speak.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.folds:
            x = x + block(x)
        return self.speak(x)
