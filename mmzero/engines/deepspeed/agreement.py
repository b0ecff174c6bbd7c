"""Values that a ds_config and the run's own config both give, which have to be the same."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from mmzero.config import ZeroConfig, section, without_auto
from mmzero.config.engine_options import DTYPE_SECTIONS, PATH
from mmzero.config.reader import DTYPES, is_number
from mmzero.engines.deepspeed.schedulers import scheduler_fault
from mmzero.engines.options import Training
from mmzero.errors import ConfigError


def check_training(training: Training, config: ZeroConfig) -> None:
    """Refuse options that say other things than the run.

    Args:
        training (Training): What the run says of its steps.
        config (ZeroConfig): The checked config.

    Raises:
        ConfigError: If they do; it lists all faults.
    """
    options = without_auto(config.engine_options or {})
    found = [
        *_batch_faults(options, training),
        *_hpz_faults(options, training),
        *_clip_faults(options, training),
        *_dtype_faults(options, training),
        *_scale_faults(options, training),
        *_optimizer_faults(options, training),
        *scheduler_fault(options, training),
    ]
    if found:
        raise ConfigError([f'{PATH}.{path}: {why}' for path, why in found])


Found = Iterator[tuple[str, str]]


def _batch_faults(options: Mapping[str, Any], training: Training) -> Found:
    total, given, steps = (
        value if type(value) is int else None
        for value in map(
            options.get, ('train_batch_size', 'train_micro_batch_size_per_gpu', 'gradient_accumulation_steps')
        )
    )
    batch_size, counts, ranks = training.batch_size, training.micro_batches, training.world_size
    if given is not None and batch_size is not None and given != batch_size:
        why = f'got {given}, and train_dataloader.batch_size is {batch_size}; give both the same'
        yield 'train_micro_batch_size_per_gpu', why
    if steps is not None and steps != counts:
        why = f'got {steps}, and optim_wrapper.accumulative_counts is {counts}; set accumulative_counts={steps} there'
        yield 'gradient_accumulation_steps', why
    if total is None or ranks is None:
        return
    micro = batch_size or given
    if micro is None:
        if total % (counts * ranks):
            why = f'got {total}, which {counts} micro-batches on {ranks} rank(s) cannot share; give a multiple of '
            yield 'train_batch_size', f'{why}{counts * ranks}'
        return
    if total != micro * counts * ranks:
        yield 'train_batch_size', _told_batch(total, micro, counts, ranks)


def _hpz_faults(options: Mapping[str, Any], training: Training) -> Found:
    name, ranks = 'zero_hpz_partition_size', training.world_size
    size = section(options, 'zero_optimization').get(name)
    # DeepSpeed takes a larger size for that of all ranks.
    if type(size) is int and ranks is not None and 1 < size < ranks and ranks % size:
        divisors = ', '.join(str(number) for number in range(2, ranks + 1) if ranks % number == 0)
        yield f'zero_optimization.{name}', f'got {size}, which does not divide {ranks} ranks; give one of {divisors}'


def _told_batch(total: int, micro: int, counts: int, ranks: int) -> str:
    product = micro * counts * ranks
    why = f'got {total}; it is the micro batch x accumulation x ranks, here {micro} x {counts} x {ranks} = {product}. '
    if total % (micro * ranks) == 0:
        right = total // (micro * ranks)
        return f'{why}For {total}, gradient_accumulation_steps (optim_wrapper.accumulative_counts) would be {right}'
    near = micro * ranks
    return f'{why}No accumulation makes {total} of {micro} on {ranks} rank(s): give a multiple of {near}, or remove it'


def _clip_faults(options: Mapping[str, Any], training: Training) -> Found:
    given = options.get('gradient_clipping')
    if not is_number(given):
        return
    own = 0.0 if training.clip is None else training.clip.options.get('max_norm')
    if given != own:
        clipped = f'clip_grad=dict(max_norm={given})' if given else 'no clip_grad'
        told = 'clips nothing' if training.clip is None else f'has clip_grad with max_norm={own}'
        yield 'gradient_clipping', f'got {given}, and optim_wrapper {told}; say {clipped} there, or remove this'


def _dtype_faults(options: Mapping[str, Any], training: Training) -> Found:
    for name, dtype in DTYPE_SECTIONS.items():
        enabled = section(options, name).get('enabled')
        is_that = training.dtype == DTYPES[dtype]
        if enabled is True and not is_that:
            told = str(training.dtype or 'float32').removeprefix('torch.')
            yield f'{name}.enabled', f"got True, and optim_wrapper.dtype is {told}; set dtype='{dtype}' there"
        if enabled is False and is_that:
            yield f'{name}.enabled', f'got False, and optim_wrapper.dtype is {dtype}; give one of them'


def _scale_faults(options: Mapping[str, Any], training: Training) -> Found:
    fp16, scale = section(options, 'fp16'), training.loss_scale
    if scale is None or not fp16.get('enabled', True):
        return
    own = {} if scale.static is None else dict(loss_scale=scale.static)
    if 'init_scale' in scale.options:
        own['initial_scale_power'] = math.log2(scale.options['init_scale'])
    if 'growth_interval' in scale.options:
        own['loss_scale_window'] = scale.options['growth_interval']
    if scale.static is None and scale.options:
        own['loss_scale'] = 0
    for name, value in own.items():
        if is_number(fp16.get(name)) and fp16[name] != value:
            yield f'fp16.{name}', f'got {fp16[name]}, and optim_wrapper.loss_scale makes it {value:g}; give one of them'


_ADAMW = 'AdamW'
# Arguments that choose among DeepSpeed's own classes.
_OF_DEEPSPEED = ('torch_adam', 'adam_w_mode', 'fp32_optimizer_states')
# Names that DeepSpeed gives to optimizers; the type is compared without regard to case.
_TYPES = dict(adam='Adam', adamw=_ADAMW, sgd='SGD', adagrad='Adagrad', lion='Lion', lamb='Lamb')


def _optimizer_faults(options: Mapping[str, Any], training: Training) -> Found:
    given, own = section(options, 'optimizer'), training.optimizer
    if not given or own is None:
        return
    params = section(given, 'params')
    name = _type_of(given, params)
    if name is not None and name.lower() != str(own.get('type', '')).lower():
        yield (
            'optimizer.type',
            f'got {given["type"]!r}, which is {name}, and optim_wrapper.optimizer is {own.get("type")}; MMEngine '
            f"builds the optimizer: say type='{name}' there, or remove this section",
        )
    for key, value in params.items():
        if key in _OF_DEEPSPEED:
            continue
        if key not in own:
            yield f'optimizer.params.{key}', f'got {value!r}, and optim_wrapper.optimizer has none; say it there'
        elif not _same(value, own[key]):
            why = f'got {value!r}, and optim_wrapper.optimizer.{key} is {own[key]!r}'
            yield f'optimizer.params.{key}', f'{why}; MMEngine builds the optimizer: say {key}={value!r} there'


def _type_of(given: Mapping[str, Any], params: Mapping[str, Any]) -> str | None:
    name = given.get('type')
    if not isinstance(name, str):
        return None
    # DeepSpeed's Adam is AdamW unless told otherwise.
    if name.lower() == 'adam' and params.get('adam_w_mode', True):
        return _ADAMW
    return _TYPES.get(name.lower(), name)


def _same(given: Any, own: Any) -> bool:
    if isinstance(given, (list, tuple)) and isinstance(own, (list, tuple)):
        return len(given) == len(own) and all(map(_same, given, own))
    if isinstance(given, str) and is_number(own):
        # JSON without a point, as '3e-5' in quotes.
        try:
            return float(given) == own
        except ValueError:
            return False
    return given == own
