"""A backbone whose blocks have an option for memory of their own, and the patch that lets mmzero recompute them."""

from mmdet.registry import MODELS
from mmengine.model import BaseModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmzero.patches import CheckpointPatch, set_attribute
from mmzero.registry import CHECKPOINT_PATCHES


class LowMemoryBlock(BaseModule):
    """A residual block that notes the mean of its input, and is recomputed re-entrantly where ``low_memory`` is set."""

    def __init__(self, channels: int, low_memory: bool) -> None:
        super().__init__()
        self.low_memory = low_memory
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(), nn.Dropout2d(0.1)
        )

    def forward(self, x: Tensor, means: list | None = None) -> Tensor:
        """Note the mean, where there is a list for it, and run the layers."""
        if means is not None:
            means.append(x.detach().mean())
        if self.low_memory and x.requires_grad:
            return x + checkpoint(self.layers, x, use_reentrant=True)
        return x + self.layers(x)


@MODELS.register_module()
class LowMemoryBackbone(BaseModule):
    """Two stages of such blocks; ``means`` has what the last forward has noted."""

    def __init__(self, channels: int = 16, depth: int = 2, low_memory: bool = False) -> None:
        super().__init__()
        self.stems = nn.ModuleList(
            [nn.Conv2d(3, channels, 4, stride=4), nn.Conv2d(channels, 2 * channels, 2, stride=2)]
        )
        self.stages = nn.ModuleList(
            nn.ModuleList(LowMemoryBlock(width, low_memory) for _ in range(depth)) for width in (channels, 2 * channels)
        )
        self.means: list[Tensor] = []

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the map of each stage."""
        self.means, maps = [], []
        for stem, stage in zip(self.stems, self.stages, strict=True):
            x = stem(x)
            for block in stage:
                x = block(x, self.means)
            maps.append(x)
        return tuple(maps)


@CHECKPOINT_PATCHES.register_module(name='LowMemoryBlock')
class LowMemoryPatch(CheckpointPatch):
    """Recomputes the layers of a block, and not what it notes, so that the list grows once for each forward."""

    def asks_for(self, module):
        """See :class:`mmzero.patches.CheckpointPatch`."""
        return (module.layers,) if module.low_memory else ()

    def turn_off(self, module):
        """See :class:`mmzero.patches.CheckpointPatch`."""
        return set_attribute(module, 'low_memory', False)

    def arguments(self, module, args, kwargs):
        """See :class:`mmzero.patches.CheckpointPatch`; for a block that is named whole, the list is left out."""
        return args[:1], {}
