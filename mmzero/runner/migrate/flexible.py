"""Fields that FlexibleRunner reads otherwise than ZeroRunner, and the runner itself."""

from collections.abc import Mapping

from mmzero.runner.migrate.draft import Draft
from mmzero.runner.translate import type_name

RUNNER = 'mmzero.ZeroRunner'

UNREAD = ('activation_checkpointing', 'find_unused_parameters', 'sync_bn', 'efficient_conv_bn_eval')
"""Top-level keys that ZeroRunner reads, and FlexibleRunner passes over."""


def migrate_runner(draft: Draft, was_flexible: bool) -> None:
    """Name ZeroRunner, and answer the runner's own fields.

    Args:
        draft (Draft): Takes the outcome.
        was_flexible (bool): Whether the config was FlexibleRunner's.
    """
    given = draft.cfg.get('runner_type')
    why = 'it checks, builds, loads and shards in the order that a sharded model needs'
    draft.becomes('runner_type', given, {'runner_type': RUNNER}, why)
    if given is not None and type_name(given) not in ('Runner', 'FlexibleRunner'):
        draft.lost('runner_type', given, 'what this runner did beside is gone; derive it from mmzero.ZeroRunner')
    _migrate_compile(draft, was_flexible)
    if was_flexible:
        _migrate_flexible(draft)


def _migrate_compile(draft: Draft, was_flexible: bool) -> None:
    value = draft.cfg.get('compile')
    if not value and not isinstance(value, Mapping):
        return
    if was_flexible:
        why = "FlexibleRunner.from_cfg did not hand it on; now each unit's forward is compiled by itself"
    else:
        why = "train_step was compiled as a whole; now each unit's forward is, by itself"
    draft.differs('compile', value, why)
    if isinstance(value, Mapping) and value.get('target', 'forward') != 'forward':
        left = {name: item for name, item in value.items() if name != 'target'}
        draft.becomes('compile.target', value['target'], {'compile': left or True}, 'units compile their forward alone')


def _migrate_flexible(draft: Draft) -> None:
    resume = draft.cfg.get('resume')
    if isinstance(resume, str):
        why = 'ZeroRunner resumes from load_from'
        draft.becomes('resume', resume, {'resume': True, 'load_from': resume}, why)
    for name in UNREAD:
        if draft.cfg.get(name) and name == 'find_unused_parameters' and draft.engine == 'deepspeed':
            why = 'FlexibleRunner does not read it, and DeepSpeed has no such argument'
            draft.becomes(name, draft.cfg[name], {name: False}, why)
        elif draft.cfg.get(name):
            draft.differs(name, draft.cfg[name], 'FlexibleRunner does not read it, ZeroRunner does')
    name = 'init_weights_for_test_or_val'
    if name in draft.cfg:
        why = 'weights are initialised only where no checkpoint of the whole model is loaded'
        draft.needless(name, draft.cfg.pop(name), why)


def migrate_amp(draft: Draft) -> None:
    """Answer AmpOptimWrapper, which stays.

    Args:
        draft (Draft): Takes the outcome.
    """
    for path, wrapper in draft.optimizers():
        if type_name(wrapper.get('type', 'OptimWrapper')) != 'AmpOptimWrapper':
            continue
        if wrapper.pop('use_fsdp', None):
            draft.needless(f'{path}.use_fsdp', True, 'the loss scale looks at the gradients of all ranks')
        if wrapper.get('dtype') is None:
            why = "without one autocast was in float16, and is in bfloat16 now; dtype='float16' is the old way"
            draft.differs(f'{path}.dtype', None, why)


def migrate_unused(draft: Draft) -> None:
    """Let DDP, which stage 0 is, take parameters without a gradient, as the others did.

    Args:
        draft (Draft): Takes the outcome.
    """
    if draft.stage == 0 and draft.engine == 'fsdp2' and not draft.cfg.get('find_unused_parameters'):
        why = 'DDP stops where a parameter has no gradient, and this did not; remove it where all of them have one'
        draft.becomes('model_wrapper_cfg.stage', 0, {'model_wrapper_cfg.find_unused_parameters': True}, why)
