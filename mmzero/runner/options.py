"""What the tools do with a config before a runner is built from it."""

import argparse
import copy
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmengine.config import Config, DictAction
from mmengine.hub import get_config
from mmengine.registry import RUNNERS
from mmengine.runner import Runner
from mmengine.utils import get_installed_path

from mmzero.engines import LAUNCHERS
from mmzero.errors import ConfigError, near_names
from mmzero.runner.blame import describe_error
from mmzero.runner.literals import read_literal
from mmzero.runner.lookup import lookup
from mmzero.runner.several import optimizers_of
from mmzero.runner.translate import type_name
from mmzero.runner.zero_runner import ZeroRunner


class Settings(DictAction):
    """Argparse's action for ``key=value`` words, with a plain error for what is none."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *rest: Any) -> None:
        """Parse the words."""
        for word in values:
            if '=' not in word.strip('='):
                parser.error(f'--cfg-options: got {word!r}; expected key=value')
        # MMEngine's reading of a dict within a dict, or of one as a call, does not end.
        dicts = dict(word.split('=', 1) for word in values if _is_dict(word.split('=', 1)[1]))
        try:
            super().__call__(parser, namespace, [word for word in values if word.split('=', 1)[0] not in dicts], *rest)
            getattr(namespace, self.dest).update({key: read_literal(text) for key, text in dicts.items()})
        except (AssertionError, ValueError) as error:
            parser.error(f'--cfg-options: cannot read {" ".join(values)}: {error}')


def _is_dict(text: str) -> bool:
    return text.strip().startswith(('dict(', '{', '[dict(', '[{', '(dict(', '({'))


def tool_parser(description: str) -> argparse.ArgumentParser:
    """Make a parser with the arguments that mmdet's tools have in common.

    Args:
        description (str): What the tool does.

    Returns:
        argparse.ArgumentParser: It takes a config, ``--work-dir``, ``--cfg-options`` and ``--launcher``.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument('config', help='config file')
    parser.add_argument('--work-dir', help='folder for logs and results')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=Settings,
        help='settings that override the config, as key=value; lists as key="[a,b]", dicts as key="dict(name=1)"',
    )
    parser.add_argument('--launcher', choices=list(LAUNCHERS), default='none')
    # torch.distributed.launch passes it; torchrun sets the variable.
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0)
    return parser


def config_of(args: argparse.Namespace) -> Config:
    """Read the config of a tool and put its common arguments in place.

    Args:
        args (argparse.Namespace): From a parser of :func:`tool_parser`.

    Returns:
        Config: The config, with ``launcher`` and ``work_dir``.
    """
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    cfg = load_config(args.config, args.cfg_options)
    cfg.launcher = args.launcher
    cfg.work_dir = args.work_dir or cfg.get('work_dir') or str(Path('work_dirs') / Path(args.config).stem)
    return cfg


def load_config(filename: str, options: dict[str, Any] | None = None) -> Config:
    """Read a config file and override settings in it.

    Args:
        filename (str): The file, or a config of an installed package, such as ``mmdet::dino/dino-4scale_...py``.
        options (dict, optional): Settings by dotted key, as ``--cfg-options`` gives them. Defaults to None.

    Returns:
        Config: The config.

    Raises:
        ConfigError: If the file is not there or cannot be read.
    """
    if not Path(filename).is_file() and '::' not in filename:
        raise ConfigError([f'{filename}: no such config file'])
    try:
        cfg = _of_package(filename) if '::' in filename else Config.fromfile(filename)
    except Exception as error:
        # A config is Python: it may fail in any way.
        raise ConfigError([f'{filename}: cannot be read: {describe_error(error)}']) from error
    try:
        cfg.merge_from_dict(options or {})
    except (KeyError, TypeError, IndexError, ValueError, AssertionError, AttributeError) as error:
        raise ConfigError([f'--cfg-options: do not fit {filename}: {error}']) from error
    return cfg


def _of_package(name: str) -> Config:
    package, _, path = name.partition('::')
    # MMEngine's function wants a folder of letters, digits and underscores, and not 'gn+ws' or 'legacy_1.x'.
    if re.match(r'\w+/', path):
        return get_config(name)
    return Config.fromfile(Path(get_installed_path(package), '.mim', 'configs', path))


def enable_amp(cfg: Config) -> None:
    """Turn on mixed precision, as ``--amp`` does in mmdet.

    Args:
        cfg (Config): Changed in place.

    Raises:
        ConfigError: If the config has no ``optim_wrapper``.
    """
    wrapper = _section(cfg, 'optim_wrapper', '--amp')
    for one in optimizers_of(wrapper).values() or [wrapper]:
        one['type'] = 'AmpOptimWrapper'
        one.setdefault('loss_scale', 'dynamic')


def _section(cfg: Config, name: str, option: str) -> Any:
    if not isinstance(cfg.get(name), dict):
        raise ConfigError([f'{name}: got {cfg.get(name)!r}; expected a dict, which {option} needs'])
    return cfg[name]


def enable_auto_scale_lr(cfg: Config) -> None:
    """Turn on the scaling of the learning rate by the batch size.

    Args:
        cfg (Config): Changed in place.

    Raises:
        ConfigError: If the config does not say for which batch size its learning rate is.
    """
    settings = cfg.get('auto_scale_lr')
    if not isinstance(settings, dict) or 'base_batch_size' not in settings:
        raise ConfigError(['auto_scale_lr.base_batch_size: is missing, and --auto-scale-lr needs it'])
    settings['enable'] = True


def enable_tta(cfg: Config) -> None:
    """Turn on test-time augmentation, with mmdet's defaults where the config has none.

    Args:
        cfg (Config): Changed in place.

    Raises:
        ConfigError: If the config has no model, or no data set to test on.
    """
    _section(cfg, 'model', '--tta')
    dataset = _section(_section(cfg, 'test_dataloader', '--tta'), 'dataset', '--tta')
    cfg.setdefault(
        'tta_model', dict(type='DetTTAModel', tta_cfg=dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=100))
    )
    while 'dataset' in dataset:
        dataset = dataset['dataset']
    if 'tta_pipeline' not in cfg:
        keys = ('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor', 'flip', 'flip_direction')
        flips = [dict(type='RandomFlip', prob=1.0), dict(type='RandomFlip', prob=0.0)]
        pack = [dict(type='PackDetInputs', meta_keys=keys)]
        cfg.tta_pipeline = [*copy.deepcopy(dataset.pipeline)[:-1], dict(type='TestTimeAug', transforms=[flips, pack])]
    dataset.pipeline = cfg.tta_pipeline
    cfg.model = dict(**cfg.tta_model, module=cfg.model)


def build_runner(cfg: Config) -> Runner:
    """Build the runner that a config names; MMEngine's own where it names none.

    Args:
        cfg (Config): The config.

    Returns:
        Runner: The runner.

    Raises:
        ConfigError: If it names none that exists, or holds fields that would have no effect.
    """
    name = cfg.get('runner_type')
    if name is None:
        if _is_sharded(cfg):
            raise ConfigError(
                ["runner_type: is missing, without which ZeroModelWrapper cannot train; add 'mmzero.ZeroRunner'"]
            )
        return Runner.from_cfg(cfg)
    runner = name if isinstance(name, type) else _runner_named(name)
    if _is_sharded(cfg) and not (isinstance(runner, type) and issubclass(runner, ZeroRunner)):
        raise ConfigError(
            [f"runner_type: got {name!r}, with which ZeroModelWrapper cannot train; use 'mmzero.ZeroRunner'"]
        )
    return RUNNERS.build(cfg)


def _is_sharded(cfg: Config) -> bool:
    wrapper = cfg.get('model_wrapper_cfg')
    return isinstance(wrapper, dict) and type_name(wrapper.get('type')) == 'ZeroModelWrapper'


def _runner_named(name: Any) -> Callable:
    found = lookup(RUNNERS, name, 'mmengine')[0] if isinstance(name, str) else None
    if found is None:
        raise ConfigError([f'runner_type: no runner {name!r}{near_names(str(name), ("mmzero.ZeroRunner", "Runner"))}'])
    return found
