"""DeepSpeed's own config, from mmzero's and from what is passed through."""

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mmzero.config import ZeroConfig, without_auto
from mmzero.config.engine_options import PATH
from mmzero.engines.deepspeed.loss_scale import fp16_section
from mmzero.engines.deepspeed.precision import HALF
from mmzero.engines.options import Training
from mmzero.errors import ConfigError

# DeepSpeed's default; it allocates the bucket whole, whatever the size of the model.
LARGEST_BUCKET = 500_000_000
# DeepSpeed's default of offload_optimizer.buffer_count.
DEFAULT_BUFFERS = 4
# DeepSpeed's defaults of offload_param: buffer_count and buffer_size.
PARAM_BUFFERS = (5, 100_000_000)
MICRO_BATCH = 'train_micro_batch_size_per_gpu'

_NAMES = {torch.float32: 'fp32', torch.bfloat16: 'bf16', torch.float16: 'fp16'}


def ds_config(config: ZeroConfig, model: nn.Module, training: Training) -> dict[str, Any]:
    """Translate a config.

    Args:
        config (ZeroConfig): The checked config.
        model (nn.Module): The model, real.
        training (Training): What the run says of its steps.

    Returns:
        dict[str, Any]: The argument of ``deepspeed.initialize``.

    Raises:
        ConfigError: If the loss is scaled as DeepSpeed cannot.
    """
    numel = sum(param.numel() for param in model.parameters() if param.requires_grad)
    defaults = dict(
        zero_optimization=dict(reduce_bucket_size=min(LARGEST_BUCKET, max(numel, 1))),
        zero_allow_untested_optimizer=True,
        # MMEngine's optimizer is used where DeepSpeed would want its own, which it would have to compile.
        zero_force_ds_cpu_optimizer=False,
        data_types=dict(grad_accum_dtype='fp32'),
        steps_per_print=None,
        wall_clock_breakdown=False,
        log_level='warning',
    )
    passed = {
        name: value
        for name, value in without_auto(config.engine_options or {}).items()
        # MMEngine's own; that they say the same is checked.
        if name not in ('optimizer', 'scheduler', 'train_batch_size', 'bfloat16')
    }
    batch_size = training.batch_size or passed.get(MICRO_BATCH) or 1
    half = _half_precision(config, training)
    ours = dict(
        train_micro_batch_size_per_gpu=batch_size,
        gradient_accumulation_steps=training.micro_batches,
        gradient_clipping=max_norm(training),
        zero_optimization=dict(stage=config.stage, **_offload(config)),
        communication_data_type=_NAMES[config.precision.reduce_dtype or torch.float32],
    )
    return merged(merged(defaults, half), merged(passed, ours))


def max_norm(training: Training) -> float:
    """DeepSpeed's ``gradient_clipping``, where 0 is none.

    Args:
        training (Training): What the run says of its steps.

    Returns:
        float: The largest norm.
    """
    return 0.0 if training.clip is None else float(training.clip.options['max_norm'])


def _half_precision(config: ZeroConfig, training: Training) -> dict[str, Any]:
    if config.precision.param_dtype not in HALF:
        return {}
    if config.precision.param_dtype == torch.bfloat16:
        return dict(bf16=dict(enabled=True))
    return {} if training.loss_scale is None else dict(fp16=fp16_section(training.loss_scale))


def _offload(config: ZeroConfig) -> dict[str, Any]:
    places = dict(offload_param=config.offload.params, offload_optimizer=config.offload.optimizer)
    found: dict[str, Any] = {}
    for name, place in places.items():
        if place is not None:
            path = dict(nvme_path=config.offload.nvme_path) if place == 'nvme' else {}
            found[name] = dict(device=place, **path)
    return found


def on_disk(settings: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Have swap files in another folder.

    Args:
        settings (Mapping[str, Any]): DeepSpeed's config.
        folder (str): This process's.

    Returns:
        dict[str, Any]: A new config.
    """
    zero = settings['zero_optimization']
    places = {
        name: dict(nvme_path=folder)
        for name in ('offload_param', 'offload_optimizer')
        if isinstance(zero.get(name), Mapping) and zero[name].get('device') == 'nvme'
    }
    return merged(settings, dict(zero_optimization=places))


def with_buffers(settings: Mapping[str, Any], needed: int) -> dict[str, Any]:
    """Have enough buffers for the step of an optimizer on a disk, without which it dies of an assertion.

    Args:
        settings (Mapping[str, Any]): DeepSpeed's config, with ``offload_optimizer``.
        needed (int): Buffers that a group takes; where DeepSpeed reads the next one, or writes the one before, beside a
            step, each takes as many.

    Returns:
        dict[str, Any]: A new config.

    Raises:
        ConfigError: If the config asks for fewer.
    """
    asked = settings['zero_optimization']['offload_optimizer']
    needed *= 1 + bool(asked.get('pipeline_read')) + bool(asked.get('pipeline_write'))
    given = asked.get('buffer_count')
    if given is not None and given < needed:
        why = f'the optimizer takes {needed}, for weights, gradients, entries of its state and pipelining; got {given}'
        path = f'{PATH}.zero_optimization.offload_optimizer.buffer_count'
        raise ConfigError([f'{path}: {why}; give {needed} or more, or leave it out'])
    buffers = dict(buffer_count=given or max(needed, DEFAULT_BUFFERS))
    return merged(settings, dict(zero_optimization=dict(offload_optimizer=buffers)))


def with_param_buffers(settings: Mapping[str, Any], model: nn.Module, ranks: int) -> dict[str, Any]:
    """Have buffers that suit a model for parameters on a disk, where the config gives neither number nor size.

    DeepSpeed's five are each for a tensor of 100 million elements; it dies of an assertion once it gathers more than
    five large parameters ahead. Here as much memory at most, or five buffers if that is more, is cut into buffers of
    the largest part that a rank holds.

    Args:
        settings (Mapping[str, Any]): DeepSpeed's config, with ``offload_param``.
        model (nn.Module): The model, whole.
        ranks (int): Among how many its parameters are shared.

    Returns:
        dict[str, Any]: A new config.
    """
    asked = settings['zero_optimization']['offload_param']
    if asked.get('buffer_count') is not None or asked.get('buffer_size') is not None:
        return merged(settings, {})
    # Partitions are padded.
    parts = [param.numel() // ranks + 1024 for param in model.parameters()]
    size = max(parts, default=1)
    count = max(PARAM_BUFFERS[0], min(len(parts), math.prod(PARAM_BUFFERS) // size))
    return merged(settings, dict(zero_optimization=dict(offload_param=dict(buffer_count=count, buffer_size=size))))


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Put one nested dict over another.

    Args:
        under (Mapping[str, Any]): The one whose values give way.
        over (Mapping[str, Any]): The other.

    Returns:
        dict[str, Any]: A new one.
    """
    found = copy.deepcopy(dict(under))
    for name, value in over.items():
        below = found.get(name)
        is_nested = isinstance(below, Mapping) and isinstance(value, Mapping)
        found[name] = merged(below, value) if is_nested else copy.deepcopy(value)  # type: ignore[arg-type]
    return found
