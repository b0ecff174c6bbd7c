"""What DeepSpeed knows and mmzero does not pass on: it has no place in a run of MMEngine, or is not there yet."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mmzero.config import section


def _is_on(part: Any) -> bool:
    return isinstance(part, Mapping) and bool(part.get('enabled'))


def _says_something(part: Any) -> bool:
    return bool(part)


_SIZE = 'changes among how many ranks a batch is shared, which mmzero does not support; remove it'
SECTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    'activation_checkpointing': (
        _says_something,
        'is for models that call deepspeed.checkpointing, and does nothing here; use activation_checkpointing of '
        'model_wrapper_cfg, or of the config',
    ),
    'autotuning': (_is_on, "starts runs of its own, by DeepSpeed's launcher; remove it"),
    'checkpoint': (_says_something, "is for DeepSpeed's own checkpoints, and mmzero saves the run's; remove it"),
    'compile': (_says_something, 'is not supported; remove it'),
    'data_efficiency': (_is_on, "is for DeepSpeed's data loader, and MMEngine's is used; remove it"),
    'dataloader_drop_last': (_says_something, 'use drop_last of train_dataloader'),
    'datastates_ckpt': (_says_something, "is for DeepSpeed's own checkpoints, and mmzero saves the run's; remove it"),
    'expert_parallel': (_is_on, _SIZE),
    'hybrid_engine': (_is_on, 'is for another engine of DeepSpeed, for reinforcement learning; remove it'),
    'pipeline': (_says_something, 'is for models made of pipeline stages; remove it'),
    'sequence_parallel_size': (lambda value: value not in (None, 1), _SIZE),
    'tensor_parallel': (_says_something, _SIZE),
    'torch_autocast': (_is_on, "use optim_wrapper.dtype, such as 'bfloat16', which runs the forward under autocast"),
    'use_data_before_expert_parallelism': (_says_something, _SIZE),
    'weight_quantization': (_says_something, 'is for inference; remove it'),
    'managed_gradient_accumulation': (
        lambda value: value is False,
        'MMEngine says which micro-batch is the last; remove it',
    ),
}
"""Sections that DeepSpeed knows and that have no place in a run of MMEngine: when, and what to do."""


def _is_true(value: Any) -> bool:
    return value is True


_QUANTISED = 'is not supported yet: it needs CUDA, and was never tried here; remove it'
_SKIPPED = 'a step whose gradients are not finite is skipped, which DeepSpeed tells by this; remove it'
WITHIN: dict[str, dict[str, tuple[Callable[[Any], bool], str]]] = {
    'zero_optimization': {
        'zero_quantized_weights': (_is_true, _QUANTISED),
        'zero_quantized_nontrainable_weights': (_is_true, _QUANTISED),
        'zero_quantized_gradients': (_is_true, _QUANTISED),
        'zenflow': (_says_something, 'is not supported yet; remove it'),
        'compute_grad_norm': (lambda value: value is False, _SKIPPED),
    },
    'bf16': {'check_grad_overflow': (lambda value: value is False, _SKIPPED)},
}
"""The same of keys in sections."""


def section_fault(path: str, value: Any) -> str | None:
    """Say why a key is not passed on.

    Args:
        path (str): Of a section, or of a key in one, with a dot.
        value (Any): What it says.

    Returns:
        str, optional: What to do; None where it is passed on.
    """
    outer, _, name = path.partition('.')
    is_meant, why = (WITHIN.get(outer, {}).get(name) if name else SECTIONS.get(outer)) or (lambda value: False, '')
    return why if is_meant(value) else None


def section_faults(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Find what is not passed on.

    Args:
        options (Mapping[str, Any]): DeepSpeed's config.

    Yields:
        tuple[str, str]: Path in the options, and what to do.
    """
    places = {name: options.get(name) for name in SECTIONS}
    places |= {f'{outer}.{name}': section(options, outer).get(name) for outer, keys in WITHIN.items() for name in keys}
    for path, value in places.items():
        why = section_fault(path, value)
        if why is not None:
            yield path, why


def combination_faults(
    zero: Mapping[str, Any], stage: int, params_on_disk: bool, optimizer_on_disk: bool
) -> Iterator[tuple[str, str]]:
    """Find what of ``zero_optimization`` does not go with the rest of a config.

    Args:
        zero (Mapping[str, Any]): The section.
        stage (int): ZeRO stage.
        params_on_disk (bool): Whether ``offload.params`` is 'nvme'.
        optimizer_on_disk (bool): Whether ``offload.optimizer`` is.

    Yields:
        tuple[str, str]: Path in the section, and what to do.
    """
    if zero.get('zero_hpz_partition_size') not in (None, 0, 1):
        if stage < 3:
            yield 'zero_hpz_partition_size', f'DeepSpeed has it at stage 3 only, got stage={stage}; remove it'
        elif params_on_disk:
            yield 'zero_hpz_partition_size', "DeepSpeed has it not with offload.params='nvme'; remove one of them"
    if params_on_disk and optimizer_on_disk and section(zero, 'offload_optimizer').get('fast_init') is True:
        why = 'DeepSpeed would read weights to where its operator reads nothing, and train from others; remove it'
        yield 'offload_optimizer.fast_init', why
