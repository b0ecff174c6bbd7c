"""The config of one curve: the same training under stock DDP in float32, or under the pair in another dtype."""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass

from mmengine.config import Config
from mmengine.optim import OptimWrapper

from mmzero.errors import ConfigError
from mmzero.runner.translate import type_name

REFERENCE = 'float32'
"""The dtype of stock DDP."""


@dataclass(frozen=True)
class Curve:
    """One training.

    Args:
        dtype (str): ``optim_wrapper.dtype`` of the pair; 'float32' for stock DDP.
        seed (int): ``randomness.seed``.
    """

    dtype: str
    seed: int

    @property
    def is_reference(self) -> bool:
        """Whether stock DDP trains it, in float32."""
        return self.dtype == REFERENCE

    def __str__(self) -> str:
        """As in a legend."""
        return f'{"DDP" if self.is_reference else "mmzero"} {self.dtype}, seed {self.seed}'

    @property
    def folder(self) -> str:
        """As the name of a folder."""
        return f'{self.dtype}-seed{self.seed}'


def planned(seeds: Sequence[int], dtypes: Sequence[str], half_seeds: Sequence[int] = ()) -> list[Curve]:
    """The trainings of a comparison, in the order in which they run.

    Args:
        seeds (Sequence[int]): Of stock DDP.
        dtypes (Sequence[str]): Of the pair.
        half_seeds (Sequence[int]): Of the pair. Defaults to none: the first of stock DDP's.

    Returns:
        list[Curve]: The trainings.
    """
    pairs = [Curve(dtype, seed) for dtype in dtypes for seed in half_seeds or seeds[:1]]
    return [*(Curve(REFERENCE, seed) for seed in seeds), *pairs]


def curve_config(cfg: Config, curve: Curve, work_dir: str) -> Config:
    """Derive the config of one training.

    Every step's own loss is logged, of rank 0, and nothing is saved.

    Args:
        cfg (Config): A config for ZeroRunner; not changed.
        curve (Curve): The training.
        work_dir (str): Its work dir.

    Returns:
        Config: The config.

    Raises:
        ConfigError: If the config is not one for ZeroRunner.
    """
    wrapper = cfg.get('model_wrapper_cfg') or {}
    if type_name(wrapper.get('type', '')) != 'ZeroModelWrapper':
        raise ConfigError(
            [f"model_wrapper_cfg: got {wrapper!r}; curves are of a config with dict(type='ZeroModelWrapper', ...)"]
        )
    cfg = copy.deepcopy(cfg)
    cfg.update(launcher='pytorch', work_dir=work_dir, randomness=dict(cfg.get('randomness') or {}, seed=curve.seed))
    cfg.log_processor = dict(cfg.get('log_processor') or {}, window_size=1)
    hooks = dict(cfg.get('default_hooks') or {})
    # MMEngine takes None for those of its own alone.
    hooks.pop('visualization', None)
    logger = dict(hooks.get('logger') or {}, type='LoggerHook', interval=1)
    cfg.pop('default_hooks', None)
    cfg.default_hooks = dict(hooks, checkpoint=None, logger=logger)
    if curve.is_reference:
        _as_stock(cfg)
    else:
        cfg.optim_wrapper.update(dtype=curve.dtype, loss_scale='dynamic')
    return cfg


def _as_stock(cfg: Config) -> None:
    cfg.pop('runner_type', None)
    unused = bool(cfg.model_wrapper_cfg.get('find_unused_parameters') or cfg.get('find_unused_parameters'))
    cfg.pop('model_wrapper_cfg')
    # MMEngine's own defaults name a GPU.
    cfg.model_wrapper_cfg = dict(
        type='MMDistributedDataParallel', device_ids=None, broadcast_buffers=False, find_unused_parameters=unused
    )
    # Also AmpOptimWrapper's; the optimizer and its groups are the constructor's.
    taken = {*inspect.signature(OptimWrapper).parameters, 'type', 'constructor', 'paramwise_cfg'}
    for name in [name for name in cfg.optim_wrapper if name not in taken]:
        cfg.optim_wrapper.pop(name)
    cfg.optim_wrapper['type'] = 'OptimWrapper'
