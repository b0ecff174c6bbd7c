"""From an error inside MMEngine, torch or a project to the part of the config that caused it."""

import inspect
import os
import traceback
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from mmengine.runner import BaseLoop, TestLoop, ValLoop
from torch import nn

from mmzero.errors import ConfigError, ZeroError
from mmzero.runner.translate import type_name

# Methods of Runner to the part of the config that they read, where nothing more exact is known.
READERS = {
    'setup_env': 'env_cfg',
    'init_process_group': 'env_cfg.dist_cfg',
    'set_randomness': 'randomness',
    'set_random_seed': 'randomness',
    'build_log_processor': 'log_processor',
    'build_logger': 'log_level',
    'build_visualizer': 'visualizer',
    'build_model': 'model',
    'register_default_hooks': 'default_hooks',
    'register_custom_hooks': 'custom_hooks',
    'build_train_loop': 'train_cfg',
    'build_val_loop': 'val_cfg',
    'build_test_loop': 'test_cfg',
    'build_optim_wrapper': 'optim_wrapper',
    'scale_lr': 'auto_scale_lr',
    'build_param_scheduler': 'param_scheduler',
    '_convert_layers': 'sync_bn',
    'dump_config': 'work_dir',
}

# What torch says of a setting of the wrapper, and what to do.
KNOWN = {
    'Expected to have finished reduction': (
        'model_wrapper_cfg.find_unused_parameters: got False, and some parameters had no gradient; set it to True'
    ),
}

# Whose mistakes are their own: what fails there keeps its traceback.
OURS = ('mmzero.engines', 'mmzero.patches', 'mmzero.wrappers', 'mmzero.checkpoint', 'mmzero.hooks', 'mmzero.policies')


@contextmanager
def blaming(cfg: Mapping, keep: Any = None, proven: Container[str] = ()) -> Iterator[None]:
    """Turn errors that a part of the config caused into a ConfigError that names it.

    Errors of mmzero itself, of the communication between ranks and of a full memory stay what they are, and so does
    whatever fails in a loop that has worked before: there it is the code or the data, not the config.

    Args:
        cfg (Mapping): The config.
        keep (Callable[[str], None], optional): Takes the traceback, which the user does not see. Defaults to None.
        proven (Container[str]): Which of 'train', 'val' and 'test' have worked once. Looked at when an error comes.

    Yields:
        None: What runs inside is watched.

    Raises:
        ConfigError: Instead of an error that a part of the config caused.
    """
    try:
        yield
    except ZeroError:
        raise
    except Exception as error:
        for text, fault in KNOWN.items():
            if text in str(error):
                raise ConfigError([fault]) from error
        path = None if _loop(_frames(error)) in proven else blame(error, cfg)
        if path is None:
            raise
        where = keep(traceback.format_exc()) if keep is not None else None
        hint = f'; its traceback is in {where}' if where else ''
        raise ConfigError([f'{path}: {describe_error(error)}{hint}']) from error


def describe_error(error: BaseException) -> str:
    """Say in one line what went wrong and where, also where an assertion says nothing.

    Args:
        error (BaseException): The error.

    Returns:
        str: Its kind, its text or the failing line where there is no text, and the innermost place outside of torch.
    """
    text = ' '.join(str(error).split())
    shown = [place for place in traceback.walk_tb(error.__traceback__) if not _only_passes(place[0])]
    places = traceback.StackSummary.extract(iter(shown))
    if not text:
        text = (places[-1].line or '').strip()
    outside = [place for place in places if f'{os.sep}torch{os.sep}' not in place.filename] or places
    where = f' ({os.sep.join(outside[-1].filename.split(os.sep)[-2:])}:{outside[-1].lineno})' if outside else ''
    return f'{type(error).__name__}: {text}{where}'


def _frames(error: BaseException) -> list[FrameType]:
    """Innermost first."""
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__) if not _only_passes(frame)][::-1]


def _only_passes(frame: FrameType) -> bool:
    """Whether a frame hands on what it is called with, and says so as pytest has it."""
    return bool(frame.f_locals.get('__tracebackhide__'))


def _loop(frames: list[FrameType]) -> str | None:
    """Which of MMEngine's loops an error comes from: 'train', 'val' or 'test'."""
    loops = [frame.f_locals.get('self') for frame in frames]
    loop = next((item for item in loops if isinstance(item, BaseLoop)), None)
    return None if loop is None else next((name for kind, name in _LOOPS if isinstance(loop, kind)), 'train')


def blame(error: BaseException, cfg: Mapping) -> str | None:
    """Find the part of the config that an error comes from.

    Args:
        error (BaseException): With its traceback.
        cfg (Mapping): The config.

    Returns:
        str or None: The config path; None where the config is not to blame.
    """
    frames = _frames(error)
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or _is_ours(frames):
        return None
    split = _loading(frames)
    nodes = [(path, node) for path, node in _nodes(cfg) if split is None or path.startswith(split)]
    for frame in frames:
        path = _built(frame, nodes) or _acting(frame, nodes) or _reading(frame, cfg)
        if path is not None:
            return path
    return split


def _loading(frames: list[FrameType]) -> str | None:
    """The data loader that was giving a batch, if one was."""
    if not any(frame.f_globals.get('__name__', '').startswith('torch.utils.data') for frame in frames):
        return None
    loop = _loop(frames)
    return None if loop is None else f'{loop}_dataloader'


_LOOPS = ((TestLoop, 'test'), (ValLoop, 'val'))


def _is_ours(frames: list[FrameType]) -> bool:
    for frame in frames:
        module = frame.f_globals.get('__name__', '')
        if module.startswith('torch.distributed') and not module.startswith('torch.distributed.fsdp'):
            # What is wrong with a group's arguments is no failure of communication.
            return not any(outer.f_code.co_name == 'init_process_group' for outer in frames)
        if not module.startswith(('torch.', 'contextlib')):
            return module.startswith(OURS)
    return False


def _nodes(cfg: Any, path: str = '') -> Iterator[tuple[str, Mapping]]:
    if isinstance(cfg, Mapping):
        if 'type' in cfg:
            yield path, cfg
        for key, value in cfg.items():
            yield from _nodes(value, f'{path}.{key}' if path else str(key))
    elif isinstance(cfg, (list, tuple)):
        for index, item in enumerate(cfg):
            yield from _nodes(item, f'{path}[{index}]')


def _built(frame: FrameType, nodes: list[tuple[str, Mapping]]) -> str | None:
    """The dict from which a registry was building."""
    cfg = frame.f_locals.get('cfg')
    if frame.f_code.co_name != 'build_from_cfg' or not isinstance(cfg, Mapping) or 'type' not in cfg:
        return None
    same = [(path, node) for path, node in nodes if type_name(node['type']) == type_name(cfg['type'])]
    scores = [(sum(_equal(cfg.get(key), value) for key, value in node.items()), path) for path, node in same]
    # The first of the best: dicts that are equal are one dict named twice.
    return max(scores, key=lambda item: item[0])[1] if scores else None


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):  # arrays
        return one is other


def _acting(frame: FrameType, nodes: list[tuple[str, Mapping]]) -> str | None:
    """The object whose method runs, where the config names its class."""
    owner = frame.f_locals.get('self')
    if owner is None or inspect.isclass(owner):
        return None
    name = type(owner).__name__.removeprefix('FSDP')
    paths = [path for path, node in nodes if type_name(node['type']) == name and not path.endswith('_cfg')]
    if isinstance(owner, nn.Module):
        paths = [path for path in paths if path.split('.')[0] in ('model', 'data_preprocessor', 'tta_model')]
    return ' or '.join(dict.fromkeys(paths)) or None


def _reading(frame: FrameType, cfg: Mapping) -> str | None:
    name = frame.f_code.co_name
    if name == 'build_dataloader':
        given = frame.f_locals.get('dataloader')
        return next((key for key in _LOADERS if given is not None and _equal(cfg.get(key), given)), 'train_dataloader')
    if name == 'build_evaluator':
        given = frame.f_locals.get('evaluator')
        return next((key for key in _EVALUATORS if _equal(cfg.get(key), given)), 'val_evaluator')
    return READERS.get(name) if dist.__name__ not in frame.f_globals.get('__name__', '') else None


_LOADERS = ('train_dataloader', 'val_dataloader', 'test_dataloader')
_EVALUATORS = ('val_evaluator', 'test_evaluator')
