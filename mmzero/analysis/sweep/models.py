"""Building a model of a sweep, and the batches it takes."""

import copy
import importlib
from typing import Any

from mmengine.config import Config
from mmengine.model.utils import revert_sync_batchnorm
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import set_random_seed
from torch import nn

from mmzero.analysis.sweep.reduction import reduced, walk
from mmzero.errors import ConfigError
from mmzero.runner.offline import no_network

PACKAGES = ('mmdet', 'mmseg', 'mmpretrain')
"""Scopes whose models are known how to feed."""

CLASS_KEYS = ('num_classes', 'num_things_classes')


class Case:
    """A config as the sweep trains it.

    Args:
        cfg (Config): The config.
        size (int): Side of the square images in pixels.

    Raises:
        ConfigError: If its default scope is of a package without inputs.
    """

    def __init__(self, cfg: Config, size: int) -> None:
        self.scope = cfg.get('default_scope') or 'mmdet'
        if self.scope not in PACKAGES:
            raise ConfigError([f'default_scope: got {self.scope!r}; inputs are made for {", ".join(PACKAGES)}'])
        self.size = size
        self.model_cfg = reduced(cfg, size)

    def build(self) -> nn.Module:
        """Build the model with the weights of seed 0; the same in every process.

        Returns:
            nn.Module: The model, initialised, in training mode.
        """
        init_default_scope(self.scope)
        set_random_seed(0)
        with no_network():
            model = MODELS.build(copy.deepcopy(self.model_cfg))
            model.init_weights()
        # Some heads ask for synchronised norms in their code.
        return revert_sync_batchnorm(model).train()

    def batch(self, model: nn.Module, number: int, empty: bool = False) -> dict:
        """Make one of a series of batches.

        Args:
            model (nn.Module): What :meth:`build` returned.
            number (int): Which batch; equal numbers are equal batches.
            empty (bool): Whether it is without objects, as far as its task has such batches. Defaults to False.

        Returns:
            dict: The batch.
        """
        inputs: Any = importlib.import_module(f'mmzero.integrations.{self.scope}.inputs')
        counts = [part.get(key) for part in walk(self.model_cfg) for key in CLASS_KEYS]
        classes = min([count for count in counts if isinstance(count, int) and count > 0], default=10)
        return inputs.demo_batch(model, self.size, number, classes=classes, empty=empty)
