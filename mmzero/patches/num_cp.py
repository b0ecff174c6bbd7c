"""``num_cp`` of mmdet's DETR-like encoders: their first so many layers are recomputed."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from mmzero.patches.checkpoint import checkpoint_module
from mmzero.patches.patch import CheckpointPatch, Undo, undo_all
from mmzero.registry import CHECKPOINT_PATCHES


def recompute_for_now(layer: nn.Module) -> nn.Module:
    """Recompute a layer with the default settings, until its encoder is patched with the run's.

    It stands in for fairscale's ``checkpoint_wrapper``, so that ``num_cp`` is never without effect, also where a model
    is trained without the pair.

    Args:
        layer (nn.Module): The layer.

    Returns:
        nn.Module: The same.
    """
    if 'forward' not in vars(layer):
        checkpoint_module(layer)
        vars(layer)['forward'].__func__.for_now = True
    return layer


@CHECKPOINT_PATCHES.register_module(name='DetrTransformerEncoder')
class NumCp(CheckpointPatch):
    """Recomputes the first ``num_cp`` layers of an encoder, and of what fuses texts into them in Grounding DINO."""

    def asks_for(self, module: nn.Module) -> Sequence[nn.Module]:
        """As the base says: its first layers."""
        count = max(getattr(module, 'num_cp', 0), 0)
        layers: Any = module.layers
        return [*layers[:count], *getattr(module, 'fusion_layers', ())[:count]]

    def turn_off(self, module: nn.Module) -> Undo:
        """As the base says: also what fairscale has put there, where the model was built before mmzero was imported."""
        undos = []
        for layer in self.asks_for(module):
            forward = vars(layer).get('forward')
            if _is_for_now(forward):
                del layer.forward
                undos.append(_put_back(layer, forward))
        return undo_all(undos)


def _is_for_now(forward: Any) -> bool:
    function = getattr(forward, 'func', getattr(forward, '__func__', None))
    return getattr(function, 'for_now', False) or getattr(function, '__module__', '').startswith('fairscale.')


def _put_back(layer: nn.Module, forward: Any) -> Callable[[], None]:
    return lambda: setattr(layer, 'forward', forward)
