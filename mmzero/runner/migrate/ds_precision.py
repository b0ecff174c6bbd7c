"""DeepSpeed's groups about 16 bit: fp16, bf16, apex's amp and torch's autocast."""

from collections.abc import Mapping
from typing import Any

from mmzero.config.engine_options import PATH as OPTIONS
from mmzero.engines.deepspeed.sections import section_fault
from mmzero.runner.migrate.draft import Answer, Draft, answer_all, lost, needless
from mmzero.runner.migrate.values import dtype_name


def pass_through(draft: Draft, path: str, value: Any, key: str) -> None:
    """Hand a key on to DeepSpeed, unless its engine refuses it.

    Args:
        draft (Draft): Takes the outcome.
        path (str): Where the config had it.
        value (Any): What it says.
        key (str): Its place in DeepSpeed's config, with dots.
    """
    refused = section_fault(key, value)
    if refused is not None:
        draft.lost(path, value, refused)
    else:
        draft.becomes(path, value, {f'{OPTIONS}.{key}': value}, "DeepSpeed's own, which gets it as it is")


def _rest(draft: Draft, path: str, given: Mapping[str, Any], key: str, answers: Mapping[str, Answer]) -> None:
    """What of a group is no mmzero field: DeepSpeed gets it, or it is answered for FSDP2."""
    if draft.engine == 'deepspeed':
        for name, value in given.items():
            pass_through(draft, f'{path}.{name}', value, f'{key}.{name}')
    else:
        answer_all(draft, path, given, answers, f"DeepSpeed's {key}")


def on_optimizers(draft: Draft, path: str, value: Any, targets: Mapping[str, Any], why: str) -> None:
    """Say something of the optimizer wrappers; of a config that has none nothing is said."""
    if targets:
        draft.becomes(path, value, targets, why)
    else:
        draft.needless(path, value, 'the config has no optimizer')


def _dtype(draft: Draft, path: str, dtype: str, why: str, **more: Any) -> None:
    targets = {}
    for name, value in dict(dtype=dtype, **more).items():
        targets.update(draft.for_optimizers(name, value))
    on_optimizers(draft, f'{path}.enabled', True, targets, why)


_HALF = 'the float32 master weights stay with the optimizer, and autocast picks what operators compute in'


def _fp16(draft: Draft, path: str, value: Any) -> None:
    if not _group(draft, path, value):
        return
    given = {name: item for name, item in value.items() if name != 'enabled'}
    scale = given.pop('loss_scale', 0)
    power, window = given.pop('initial_scale_power', 16), given.pop('loss_scale_window', 1000)
    try:
        # DeepSpeed takes numbers such as 1e3 here; the scaler counts steps.
        dynamic = dict(init_scale=float(2**power), growth_interval=int(window))
        wanted = float(scale) or dynamic
    except (TypeError, ValueError, OverflowError):
        draft.faults.add(path, f'got {value!r}; loss_scale, initial_scale_power and loss_scale_window are numbers')
        return
    why = f'{_HALF}; the scale begins and grows as it did. bfloat16 needs none'
    _dtype(draft, path, 'float16', why, loss_scale=wanted)
    _rest(draft, path, given, 'fp16', FP16_ANSWERS)


def _bf16(draft: Draft, path: str, value: Any) -> None:
    if _group(draft, path, value):
        _dtype(draft, path, 'bfloat16', _HALF)
        _rest(draft, path, {name: item for name, item in value.items() if name != 'enabled'}, 'bf16', BF16_ANSWERS)


def _amp(draft: Draft, path: str, value: Any) -> None:
    if _group(draft, path, value):
        _dtype(draft, path, 'float16', "autocast in float16 with a loss scale takes apex's place", loss_scale='dynamic')
        for name, item in value.items():
            if name != 'enabled':
                draft.lost(f'{path}.{name}', item, "it is apex's, which is not used")


def _torch_autocast(draft: Draft, path: str, value: Any) -> None:
    if _group(draft, path, value):
        _dtype(draft, path, dtype_name(value.get('dtype', 'bfloat16')), _HALF)
        for name, item in value.items():
            if name not in ('enabled', 'dtype'):
                draft.lost(f'{path}.{name}', item, 'which modules stay float32 is said by precision.keep_fp32')


def _group(draft: Draft, path: str, value: Any) -> bool:
    """Whether a group that can be enabled is."""
    if not isinstance(value, Mapping):
        draft.faults.add(path, f'got {value!r}; expected a dict')
        return False
    if not value.get('enabled', False):
        draft.needless(path, value, 'it is not enabled')
        return False
    return True


FP16_ANSWERS: dict[str, Answer] = {
    'hysteresis': lost("torch's GradScaler halves the scale at the first overflow"),
    'consecutive_hysteresis': lost("torch's GradScaler halves the scale at the first overflow"),
    'min_loss_scale': lost("torch's GradScaler has no least scale; optim_wrapper.max_skips ends a run that only skips"),
    'auto_cast': needless('autocast casts what operators want'),
    'fp16_master_weights_and_grads': lambda draft, path, value: (draft.lost if value else draft.needless)(
        path, value, 'master weights and the gradients of their shards are float32'
    ),
}

BF16_ANSWERS: dict[str, Answer] = {
    'immediate_grad_update': needless('gradients are reduced as backward comes to them'),
    'check_grad_overflow': needless('a step with gradients that are not finite is skipped: optim_wrapper.max_skips'),
    'check_overflow': needless('a step with gradients that are not finite is skipped: optim_wrapper.max_skips'),
    'bf16_master_weights_and_grads': FP16_ANSWERS['fp16_master_weights_and_grads'],
    'bf16_optimizer_states': lost('optimizer state has the dtype of the master weights, float32'),
}

PRECISION_ANSWERS: dict[str, Answer] = {
    'fp16': _fp16,
    'bf16': _bf16,
    'bfloat16': _bf16,
    'amp': _amp,
    'torch_autocast': _torch_autocast,
}
