"""DeepSpeedOptimWrapper, and DeepSpeed's own optimizers."""

from typing import Any

from mmzero.runner.migrate.draft import Draft
from mmzero.runner.translate import type_name

OWN_ADAMS = {
    'DeepSpeedCPUAdam': ('adamw_mode', ('adamw_mode', 'bias_correction', 'fp32_optimizer_states')),
    'FusedAdam': ('adam_w_mode', ('adam_w_mode', 'bias_correction', 'set_grad_none')),
}
"""DeepSpeed's optimizers that compute Adam: the argument that says whether weight decay is decoupled, and what is left
out."""

OWN = {
    **dict.fromkeys(('DeepSpeedCPUAdam', 'FusedAdam'), 'deepspeed.ops.adam'),
    'FusedLamb': 'deepspeed.ops.lamb',
}
"""The optimizers that DeepSpeedStrategy registers, and where they are."""

GONE = ('OnebitAdam', 'OnebitLamb', 'ZeroOneAdam')
"""Those that it registers, too, and that DeepSpeed 0.19 has no more."""


def migrate_ds_optimizers(draft: Draft) -> None:
    """Answer the optimizer wrappers of a config for DeepSpeedStrategy.

    Args:
        draft (Draft): Takes the outcome.
    """
    for path, wrapper in draft.optimizers():
        name = type_name(wrapper.get('type', 'OptimWrapper'))
        if name == 'DeepSpeedOptimWrapper':
            why = 'it clips, accumulates and scales the loss, under every engine'
            draft.becomes(f'{path}.type', name, {f'{path}.type': 'OptimWrapper'}, why)
        _migrate_optimizer(draft, f'{path}.optimizer', wrapper.get('optimizer'))


def _migrate_optimizer(draft: Draft, path: str, optimizer: Any) -> None:
    if not isinstance(optimizer, dict):
        return
    name = type_name(optimizer.get('type', ''))
    if name in GONE:
        draft.lost(
            f'{path}.type', name, 'DeepSpeed 0.19 has no 1-bit optimizers any more; choose another, such as AdamW'
        )
    elif draft.engine == 'deepspeed':
        if name == optimizer.get('type') and name in OWN:
            why = 'DeepSpeedStrategy registered it by its name; its path is found without'
            draft.becomes(f'{path}.type', name, {f'{path}.type': f'{OWN[name]}.{name}'}, why)
    elif name in OWN_ADAMS:
        flag, left_out = OWN_ADAMS[name]
        instead = 'AdamW' if optimizer.get(flag, True) else 'Adam'
        for field in left_out:
            if field in optimizer:
                _leave_out(draft, f'{path}.{field}', optimizer.pop(field), field)
        draft.becomes(
            f'{path}.type', name, {f'{path}.type': instead}, "torch's, which needs no build; fused=True is fast"
        )
    elif name in OWN:
        why = "it is DeepSpeed's own and compresses or fuses what FSDP2 does not; choose another, or --engine deepspeed"
        draft.lost(f'{path}.type', name, why)


def _leave_out(draft: Draft, path: str, value: Any, field: str) -> None:
    if field == 'bias_correction' and not value:
        draft.lost(path, value, "torch's Adam always corrects the bias of its averages")
    else:
        draft.needless(path, value, "it is for DeepSpeed's own kernel")
