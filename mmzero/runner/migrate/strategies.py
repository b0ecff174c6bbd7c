"""FSDPStrategy, and what all strategies of FlexibleRunner have in common."""

from collections.abc import Mapping
from typing import Any

from mmzero.runner.migrate.draft import Answer, Draft, answer_all, lost, moved, needless
from mmzero.runner.migrate.fsdp import OWNER, migrate_fsdp
from mmzero.runner.migrate.regions import classes_asked_for
from mmzero.runner.migrate.values import policy_value
from mmzero.runner.translate import type_name


def migrate_fsdp_strategy(draft: Draft, path: str, strategy: Mapping[str, Any]) -> None:
    """Answer the arguments of FSDPStrategy.

    Args:
        draft (Draft): Takes the outcome.
        path (str): Their config path.
        strategy (Mapping[str, Any]): The arguments, and ``type``.
    """
    given = {name: value for name, value in strategy.items() if name not in ('type', '_scope_')}
    if given.get('model_wrapper') is None:
        migrate_fsdp(draft, f'{path}.model_wrapper', {})
    if given.get('state_dict_cfg') is None:
        _save_shards(draft, f'{path}.state_dict_cfg', None, "by default each rank saved its own shards ('local')")
    answer_all(draft, path, given, FSDP_STRATEGY_ANSWERS, 'FSDPStrategy')


def _model_wrapper(draft: Draft, path: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        draft.faults.add(path, f'got {value!r}; expected a dict')
        return
    name = type_name(value.get('type', OWNER))
    if name != OWNER:
        draft.lost(
            f'{path}.type', name, f'ZeroModelWrapper takes its place; its arguments are read as those of {OWNER}'
        )
    migrate_fsdp(draft, path, value)


def _state_dict_cfg(draft: Draft, path: str, value: Any) -> None:
    if isinstance(value, Mapping):
        kind = value.get('state_dict_type', 'LOCAL_STATE_DICT')
        kind = str(getattr(kind, 'name', kind)).rsplit('.', 1)[-1]
        left = {name: item for name, item in value.items() if name != 'state_dict_type'}
        answer_all(draft, path, left, STATE_DICT_ANSWERS, 'state_dict_cfg')
        path, said = f'{path}.state_dict_type', kind
    else:
        kind, said = {'full': 'FULL_STATE_DICT', 'local': 'LOCAL_STATE_DICT'}.get(value, value), value
    if kind == 'FULL_STATE_DICT':
        draft.needless(path, said, 'one file, gathered tensor by tensor and written by rank 0, is the default')
    elif kind in ('LOCAL_STATE_DICT', 'SHARDED_STATE_DICT'):
        _save_shards(draft, path, said, 'each rank saves its own shards')
    else:
        draft.faults.add(path, f"got {value!r}; FSDPStrategy takes 'full', 'local' or a dict with state_dict_type")


def _save_shards(draft: Draft, path: str, value: Any, what: str) -> None:
    saving: dict[str, Any] = dict(format='sharded')
    if draft.get('default_hooks.checkpoint.published_keys') is not None:
        # Published is a file, which a sharded checkpoint has beside it.
        saving['export'] = 'last'
    why = f'{what}; any number of ranks goes on from these. Without it one .pth is saved, which stock mmdet reads'
    draft.becomes(path, value, {'checkpoint': saving}, why)


_WHERE_SAVED = 'tensors go to host memory one by one as they are saved'

STATE_DICT_ANSWERS: dict[str, Answer] = {
    'state_dict_config': needless(_WHERE_SAVED),
    'optim_state_dict_config': needless(_WHERE_SAVED),
}


def _activation_checkpointing(draft: Draft, path: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        draft.faults.add(path, f'got {value!r}; expected a dict with check_fn')
        return
    answer_all(draft, path, value, CHECKPOINTING_ANSWERS, 'apply_activation_checkpointing')


def _check_fn(draft: Draft, path: str, value: Any) -> None:
    found = classes_asked_for(value, draft.cfg)
    if isinstance(found, str):
        why = f"{found}; say which: activation_checkpointing=dict(policy=dict(type='ModuleClassPolicy', classes=[...]))"
        draft.lost(path, value, why)
        return
    policy = dict(type='ModuleClassPolicy', classes=found)
    why = 'the classes for whose modules of this model it returns True'
    draft.becomes(path, value, {'model_wrapper_cfg.activation_checkpointing': dict(policy=policy)}, why)


def _checkpointing_policy(draft: Draft, path: str, value: Any) -> None:
    try:
        policy = policy_value(value)
    except ValueError as error:
        draft.lost(path, value, str(error))
        return
    targets = {'model_wrapper_cfg.activation_checkpointing': dict(policy=policy)}
    draft.becomes(path, value, targets, 'what it chooses is recomputed')


CHECKPOINTING_ANSWERS: dict[str, Answer] = {
    'check_fn': _check_fn,
    'auto_wrap_policy': _checkpointing_policy,
    'checkpoint_wrapper_fn': lost(
        'modules keep their class and names: the non-re-entrant checkpoint is around forward, and the fields of '
        "activation_checkpointing say how (preserve_rng_state, offload='cpu', ...)"
    ),
}


def _skip_init_weights(draft: Draft, path: str, value: Any) -> None:
    why = 'rank 0 alone initialises, and load_from is read into it, before anything is sharded'
    (draft.differs if value else draft.needless)(path, value, why)


def _env_kwargs(draft: Draft, path: str, value: Any) -> None:
    answer_all(draft, path, value, ENV_ANSWERS, 'setup_env')


def _log_kwargs(draft: Draft, path: str, value: Any) -> None:
    answer_all(draft, path, value, LOG_ANSWERS, 'MMLogger')


_TOP = 'the runner reads it at the top level'

ENV_ANSWERS: dict[str, Answer] = {
    'launcher': needless('it is on the command line: --launcher'),
    'cudnn_benchmark': moved('env_cfg.cudnn_benchmark', _TOP),
    'mp_cfg': moved('env_cfg.mp_cfg', _TOP),
    'dist_cfg': moved('env_cfg.dist_cfg', _TOP),
    'resource_limit': moved('env_cfg.resource_limit', _TOP),
    'randomness': moved('randomness', _TOP),
}

_LOGGER = "the runner names its log files itself, in work_dir; MMEngine's logger can be had in a hook"

LOG_ANSWERS: dict[str, Answer] = {
    'log_level': moved('log_level', _TOP),
    'log_file': lost(_LOGGER),
    'name': lost(_LOGGER),
    'logger_name': lost(_LOGGER),
    'file_mode': lost(_LOGGER),
    'distributed': lost(_LOGGER),
    'file_handler_cfg': lost(_LOGGER),
}

STRATEGY_ANSWERS: dict[str, Answer] = {
    'work_dir': moved('work_dir', _TOP),
    'experiment_name': moved('experiment_name', _TOP),
    'auto_scale_lr': moved('auto_scale_lr', _TOP),
    'env_kwargs': _env_kwargs,
    'log_kwargs': _log_kwargs,
}
"""Arguments of BaseStrategy."""

FSDP_STRATEGY_ANSWERS: dict[str, Answer] = {
    'model_wrapper': _model_wrapper,
    'state_dict_cfg': _state_dict_cfg,
    'activation_checkpointing': _activation_checkpointing,
    'skip_init_weights': _skip_init_weights,
    'sync_bn': moved('sync_bn', 'FSDPStrategy took it and converted nothing; ZeroRunner converts'),
    **STRATEGY_ANSWERS,
}
