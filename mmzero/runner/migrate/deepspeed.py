"""DeepSpeedStrategy: its arguments are keys of DeepSpeed's own config, and a few of MMEngine's."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmzero.errors import near_names
from mmzero.runner.migrate.draft import Answer, Draft, answer_all, needless
from mmzero.runner.migrate.ds_config import DS_ANSWERS, NOT_PASSED
from mmzero.runner.migrate.ds_optim import migrate_ds_optimizers
from mmzero.runner.migrate.ds_precision import pass_through
from mmzero.runner.migrate.strategies import STRATEGY_ANSWERS


def migrate_deepspeed(draft: Draft, path: str, strategy: Mapping[str, Any]) -> None:
    """Answer the arguments of DeepSpeedStrategy.

    Args:
        draft (Draft): Takes the outcome; its engine says what they become.
        path (str): Their config path.
        strategy (Mapping[str, Any]): The arguments, and ``type``.
    """
    given = {name: value for name, value in strategy.items() if name not in ('type', '_scope_', 'config')}
    own = {name: value for name, value in given.items() if name in DEEPSPEED_STRATEGY_ANSWERS}
    answer_all(draft, path, own, DEEPSPEED_STRATEGY_ANSWERS, 'DeepSpeedStrategy')
    keys = {name: (f'{path}.{name}', value) for name, value in given.items() if name not in own and value is not None}
    # The strategy's arguments overwrite its config's keys.
    keys = {**_read(draft, f'{path}.config', strategy.get('config')), **keys}
    if draft.engine == 'deepspeed' and not _stage(keys):
        draft.differs('--engine', draft.engine, 'at stage 0 nothing is sharded, and DDP trains')
        draft.engine = 'fsdp2'
    migrate_ds_optimizers(draft)
    if draft.engine == 'deepspeed':
        draft.becomes('--engine', draft.engine, {'model_wrapper_cfg.engine': draft.engine}, 'as asked for')
    _migrate_keys(draft, keys)
    if draft.get('model_wrapper_cfg.stage') is None:
        why = 'DeepSpeed shards nothing by default, which is DDP'
        draft.becomes(f'{path}.zero_optimization.stage', None, {'model_wrapper_cfg.stage': 0}, why)
    _migrate_sources(draft)


def _read(draft: Draft, path: str, config: Any) -> dict[str, tuple[str, Any]]:
    if config is None:
        return {}
    if isinstance(config, str):
        try:
            config = json.loads(Path(config).read_text(encoding='utf-8'))
        except (OSError, ValueError) as error:
            draft.faults.add(path, f'cannot read {config}: {error}; the path is taken from the folder you are in')
            return {}
    if not isinstance(config, Mapping):
        draft.faults.add(path, f'got {config!r}; expected a dict, or the path of a JSON file with one')
        return {}
    return {name: (f'{path}.{name}', value) for name, value in config.items() if value is not None}


def _migrate_keys(draft: Draft, keys: Mapping[str, tuple[str, Any]]) -> None:
    keys = {name: (path, _without_auto(draft, path, value)) for name, (path, value) in keys.items()}
    fp16, bf16 = (keys.get(name, ('', {}))[1] for name in ('fp16', 'bf16'))
    if _enabled(fp16) and _enabled(bf16):
        draft.faults.add(keys['bf16'][0], 'is enabled beside fp16, which DeepSpeed refuses; leave one of them out')
    for name in _ordered(keys):
        path, value = keys[name]
        if value is None:
            continue
        if draft.engine == 'deepspeed' and name not in NOT_PASSED:
            pass_through(draft, path, value, name)
        elif name in DS_ANSWERS:
            DS_ANSWERS[name](draft, path, value)
        else:
            draft.lost(path, value, f"DeepSpeed's config has no such key{near_names(name, DS_ANSWERS)}")


def _ordered(keys: Mapping[str, Any]) -> Iterator[str]:
    """The stage comes first, since others depend on it."""
    yield from (name for name in DS_ANSWERS if name in keys)
    yield from (name for name in keys if name not in DS_ANSWERS)


def _without_auto(draft: Draft, path: str, value: Any) -> Any:
    """Leave out what is 'auto', at any depth; None where all of it is."""
    if value == 'auto':
        why = "'auto' is filled in by other trainers, and DeepSpeedStrategy hands it on as it is"
        draft.lost(path, value, why)
        return None
    if not isinstance(value, Mapping):
        return value
    left = {name: _without_auto(draft, f'{path}.{name}', item) for name, item in value.items()}
    return {name: item for name, item in left.items() if item is not None}


def _stage(keys: Mapping[str, tuple[str, Any]]) -> Any:
    group = keys.get('zero_optimization', ('', {}))[1]
    return group.get('stage', 0) if isinstance(group, Mapping) else group


def _enabled(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value.get('enabled'))


def _migrate_sources(draft: Draft) -> None:
    source = draft.cfg.get('load_from')
    if isinstance(source, str):
        why = (
            "DeepSpeedStrategy reads DeepSpeed's own folders alone; of these weights are read, where deepspeed is "
            'installed, and of a plain .pth'
        )
        draft.differs('load_from', source, why)


def _exclude_frozen(draft: Draft, path: str, value: Any) -> None:
    if not value:
        draft.needless(path, value, 'checkpoints hold all parameters')
        return
    why = 'checkpoints hold all parameters. For adapters of PEFT, AdapterCheckpointHook saves what was trained alone'
    draft.lost(path, value, why)


DEEPSPEED_STRATEGY_ANSWERS: dict[str, Answer] = {
    'inputs_to_half': needless('images go in as they come, and autocast casts what a layer wants; boxes stay float32'),
    'exclude_frozen_parameters': _exclude_frozen,
    **STRATEGY_ANSWERS,
}
"""Arguments that are no keys of DeepSpeed's config."""
