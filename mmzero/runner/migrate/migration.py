"""The whole of a migration: from a config for another way of sharding to one for mmzero."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmengine.config import Config

from mmzero._compat import pretended_process_group
from mmzero.config import Faults
from mmzero.errors import ConfigError, near_names
from mmzero.runner.check import check_config, missing_data
from mmzero.runner.migrate.deepspeed import migrate_deepspeed
from mmzero.runner.migrate.draft import BECOMES, DIFFERS, LOST, NEEDLESS, Draft, Note
from mmzero.runner.migrate.flexible import migrate_amp, migrate_runner, migrate_unused
from mmzero.runner.migrate.fsdp import OWNER, migrate_fsdp
from mmzero.runner.migrate.strategies import migrate_fsdp_strategy
from mmzero.runner.migrate.values import plain
from mmzero.runner.offline import no_network
from mmzero.runner.translate import translate_optim_wrapper, type_name

ENGINES = ('fsdp2', 'deepspeed')

STRATEGIES = dict(FSDPStrategy=migrate_fsdp_strategy, DeepSpeedStrategy=migrate_deepspeed)

REFUSED = {
    'ColossalAIStrategy': (
        "Gemini's chunks, its own optimizers (HybridAdam, CPUAdam) and checkpoints have no counterpart in FSDP2 or "
        'DeepSpeed, and what they hold cannot be read by either. Begin from the config without a strategy: '
        "runner_type='mmzero.ZeroRunner', model_wrapper_cfg=dict(type='ZeroModelWrapper', stage=3), an optimizer of "
        "torch such as AdamW, and for plugin='lowlevel-zero' stage=1 or 2"
    ),
    'DDPStrategy': "it shards nothing; say model_wrapper_cfg=dict(type='ZeroModelWrapper', stage=...) by hand",
    'SingleDeviceStrategy': "it shards nothing; say model_wrapper_cfg=dict(type='ZeroModelWrapper', stage=...) by hand",
}

_TITLES = {
    BECOMES: 'What says it now',
    DIFFERS: 'What acts otherwise now',
    NEEDLESS: 'What nothing has to say',
    LOST: 'WITHOUT COUNTERPART',
}


@dataclass(frozen=True)
class Migration:
    """A migrated config, and what became of the fields of the old one.

    Args:
        cfg (dict): The config, of plain values.
        notes (tuple[Note, ...]): A line about each field that was looked at.
    """

    cfg: dict[str, Any]
    notes: tuple[Note, ...]

    def text(self) -> str:
        """Write the notes, by kind; what has no counterpart comes last.

        Returns:
            str: Lines.
        """
        lines = []
        for kind, title in _TITLES.items():
            # Fields that have one reason share its line.
            reasons: dict[tuple[str, str], list[str]] = {}
            for note in self.notes:
                if note.kind == kind:
                    reasons.setdefault((note.says, note.why), []).append(note.given)
            lines += [f'{title}:'] if reasons else []
            for (says, why), given in reasons.items():
                lines.append(f'  {", ".join(given)}{" -> " if says else ""}{says}: {why}')
        return '\n'.join(lines)


def migrate_config(cfg: Mapping[str, Any], *, engine: str = 'fsdp2', ranks_per_node: int | None = None) -> Migration:
    """Turn a config for FSDPStrategy, DeepSpeedStrategy or MMFullyShardedDataParallel into one for ZeroRunner.

    Args:
        cfg (Mapping[str, Any]): The config; not changed.
        engine (str): What shards from now on; 'deepspeed' is for DeepSpeedStrategy. Defaults to 'fsdp2'.
        ranks_per_node (int, optional): For strategies that shard within a node. Defaults to None.

    Returns:
        Migration: The config for ZeroRunner, and what changed.

    Raises:
        ConfigError: If the config is for another way of sharding, or has what nothing can be made of.
    """
    draft = Draft(plain(cfg.to_dict() if isinstance(cfg, Config) else cfg), engine, ranks_per_node)
    strategy, wrapper = draft.cfg.get('strategy'), draft.cfg.get('model_wrapper_cfg')
    _refuse(strategy, wrapper, engine)
    if strategy is not None and wrapper is not None:
        why = 'FlexibleRunner does not read it; the strategy says how'
        draft.lost('model_wrapper_cfg', wrapper, why)
    draft.cfg['model_wrapper_cfg'] = dict(type='ZeroModelWrapper')
    migrate_runner(draft, was_flexible=strategy is not None)
    if strategy is not None:
        del draft.cfg['strategy']
        STRATEGIES[type_name(strategy['type'])](draft, 'strategy', strategy)
    else:
        migrate_fsdp(draft, 'model_wrapper_cfg', wrapper or {})
    migrate_amp(draft)
    migrate_unused(draft)
    draft.faults.raise_if_any()
    return Migration(draft.cfg, tuple(draft.notes))


def _refuse(strategy: Any, wrapper: Any, engine: str) -> None:
    name = type_name(strategy.get('type', '')) if isinstance(strategy, Mapping) else None
    if name in REFUSED:
        raise ConfigError([f'strategy.type: {name} cannot be migrated: {REFUSED[name]}'])
    if strategy is not None and name not in STRATEGIES:
        known = near_names(str(name), STRATEGIES)
        raise ConfigError([f'strategy.type: got {name or strategy!r}, which is not known here{known}'])
    if engine == 'deepspeed' and name != 'DeepSpeedStrategy':
        raise ConfigError(["--engine deepspeed: is for DeepSpeedStrategy; FSDP's settings have no counterpart in it"])
    kind = type_name(wrapper.get('type', '')) if isinstance(wrapper, Mapping) else None
    if strategy is None and kind == 'ZeroModelWrapper':
        raise ConfigError(['model_wrapper_cfg.type: got ZeroModelWrapper; nothing is left to migrate'])
    if strategy is None and kind != OWNER:
        got = f'; got model_wrapper_cfg.type={kind!r}' if kind else ''
        raise ConfigError(
            [f'strategy: is missing, and so is model_wrapper_cfg=dict(type={OWNER!r}); nothing is sharded here{got}']
        )


def check_migrated(cfg: Mapping[str, Any], world_size: int = 1) -> list[str]:
    """Check a migrated config as ZeroRunner will before it starts.

    What is missing on this machine's disk, data sets and checkpoints, is no fault of a config that may run elsewhere.

    Args:
        cfg (Mapping[str, Any]): The config.
        world_size (int): Number of ranks. Defaults to 1.

    Returns:
        list[str]: Faults, each with its config path.
    """
    settings = {'work_dir': 'work_dirs/migrated', **plain(cfg), 'launcher': 'none'}
    faults = Faults()
    wrapper = translate_optim_wrapper(Config(dict(settings))._cfg_dict.get('optim_wrapper'), faults)
    try:
        with no_network(), pretended_process_group(world_size):
            check_config(dict(Config(settings)._cfg_dict), wrapper, faults)
    except ConfigError as error:
        missing = {f'{path}: {advice}' for path, advice in missing_data(dict(settings), ('train', 'val'))}
        absent = ('load_from: no checkpoint at ',)
        return [line for line in error.faults if line not in missing and not line.startswith(absent)]
    return []
