"""What a config says of its steps, for engines whose own config may say it too."""

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from mmzero.config import Faults, ZeroConfig, read_loss_scale
from mmzero.config.reader import optional_dtype
from mmzero.engines import Clip, Training, build_engine, world_size_of
from mmzero.errors import ConfigError
from mmzero.runner.several import is_several
from mmzero.runner.translate import is_amp, type_name


def batch_size_of(cfg: Mapping[str, Any]) -> int | None:
    """Read the samples of a rank and micro-batch.

    Args:
        cfg (Mapping[str, Any]): The whole config.

    Returns:
        int or None: The number; None where a batch sampler or a data loader that was built decides.
    """
    loader = cfg.get('train_dataloader')
    size = loader.get('batch_size') if isinstance(loader, Mapping) else None
    return size if type(size) is int else None


def check_facts(cfg: Mapping[str, Any], config: ZeroConfig, optimizer: Any, faults: Faults) -> None:
    """Hold the engine's own options against the rest of the config.

    Args:
        cfg (Mapping[str, Any]): The whole config.
        config (ZeroConfig): The fields of ``model_wrapper_cfg``.
        optimizer (Optimizer, optional): One like the run's, which was tried.
        faults (Faults): Takes what is given twice and differs.
    """
    optim_wrapper = cfg.get('optim_wrapper')
    if not isinstance(optim_wrapper, Mapping) or is_several(optim_wrapper) or faults.at('optim_wrapper'):
        return
    try:
        engine = build_engine(config)
        training = _training(cfg, optim_wrapper, optimizer)
        engine.check_clip(training.clip)
        engine.check_training(training)
    except ConfigError as error:
        # Those of the engine itself have been told by now.
        faults.lines += [fault for fault in error.faults if fault not in faults.lines]


def _training(cfg: Mapping[str, Any], optim_wrapper: Mapping[str, Any], optimizer: Any) -> Training:
    clip = dict(optim_wrapper.get('clip_grad') or {})
    by = clip.pop('type', 'norm')
    given = dict(optim_wrapper.get('optimizer') or {})
    if isinstance(optimizer, Optimizer):
        given = {**optimizer.defaults, **given}
    given['type'] = type_name(given.get('type', ''))
    dtype = optional_dtype(optim_wrapper.get('dtype') or ('bfloat16' if is_amp(optim_wrapper) else None))
    is_scaled = str(dtype) == 'torch.float16'
    schedulers = cfg.get('param_scheduler') or []
    try:
        world_size = world_size_of(cfg.get('launcher') or 'none')
    except ValueError:
        world_size = None  # named already
    schedulers = [schedulers] if isinstance(schedulers, Mapping) else schedulers
    return Training(
        micro_batches=optim_wrapper.get('accumulative_counts') or 1,
        clip=Clip(by, clip) if clip else None,
        dtype=dtype,
        loss_scale=read_loss_scale(optim_wrapper.get('loss_scale')) if is_scaled else None,
        optimizer=given,
        schedulers=[one for one in schedulers if isinstance(one, Mapping)],
        batch_size=batch_size_of(cfg),
        world_size=world_size,
    )
