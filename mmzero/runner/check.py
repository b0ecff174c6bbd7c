"""Step 1: every fault of a config at once, before a process group or a GPU is touched."""

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from mmengine.registry import MODELS

from mmzero.config import Faults, ZeroConfig, read_checkpoint_config, read_zero_config
from mmzero.engines import LAUNCHERS, is_on_first_node, world_size_of
from mmzero.errors import near_names
from mmzero.runner.model_check import check_model
from mmzero.runner.optim_check import check_optim_wrappers, check_schedulers, check_several_schedulers
from mmzero.runner.parts import Parts, check_parts
from mmzero.runner.resuming import has_saved_before
from mmzero.runner.run_facts import check_facts
from mmzero.runner.toplevel import check_top_level
from mmzero.runner.translate import ALIASES, path_of, refuse_keys, wrapper_fields
from mmzero.runner.values import check_values


def check_config(cfg: dict, optim_wrapper: Any, faults: Faults) -> list[str]:
    """Check everything that can be told from the config, the environment and the model's structure.

    Args:
        cfg (dict): Arguments of the runner and keys of the config, as the user gave them.
        optim_wrapper (dict or OptimWrapper, optional): The translated optimizer wrapper.
        faults (Faults): Faults found so far, which are raised along with those found here.

    Returns:
        list[str]: What is not wrong and may not be meant.

    Raises:
        ConfigError: If there is a fault.
    """
    warnings: list[str] = []
    wrong = check_top_level(cfg, faults)
    cfg = {key: value for key, value in cfg.items() if key not in wrong}
    scope = default_scope(cfg, faults)
    refuse_keys(cfg, faults)
    config = read_zero_config(wrapper_fields(cfg, optim_wrapper), 'model_wrapper_cfg', faults)
    _tell_as_written(cfg, faults)
    _check_ranks(cfg, config, faults)
    _check_files(cfg, faults)
    _check_saving(cfg, config, faults)
    if scope is not None:
        parts = Parts(scope, faults)
        check_parts(cfg, parts)
        optimizer = check_optim_wrappers(cfg.get('optim_wrapper'), faults, parts)
        schedulers, train_cfg = cfg.get('param_scheduler'), cfg.get('train_cfg')
        if isinstance(optimizer, dict):
            check_several_schedulers(schedulers, optimizer, train_cfg, scope, faults)
        else:
            check_schedulers(schedulers, optimizer, train_cfg, scope, faults)
            check_facts(cfg, config, optimizer, faults)
        check_values(cfg, faults)
        warnings = check_model(cfg, config, scope, faults)
        _tell_as_written(cfg, faults)
    faults.raise_if_any()
    return warnings


def _tell_as_written(cfg: dict, faults: Faults) -> None:
    for name in ALIASES:
        faults.move(f'model_wrapper_cfg.{name}', path_of(cfg, name))


def default_scope(cfg: dict, faults: Faults) -> str | None:
    """Read the default scope.

    Args:
        cfg (dict): The config.
        faults (Faults): Takes what is wrong.

    Returns:
        str, optional: The scope; None, and a fault, where it is the name of no package.
    """
    scope = cfg.get('default_scope') or 'mmengine'
    known = {MODELS.scope, *MODELS.children}
    if scope in known or importlib.util.find_spec(scope.split('.')[0]) is not None:
        return scope
    near = near_names(scope, known | {'mmdet', 'mmengine', 'mmpretrain', 'mmseg'})
    faults.add('default_scope', f'got {scope!r}, which is no installed package{near}')
    return None


def _check_ranks(cfg: dict, config: ZeroConfig, faults: Faults) -> None:
    world_size = _world_size(cfg.get('launcher') or 'none', faults)
    if world_size is not None:
        try:
            config.mesh.sizes(world_size)
        except ValueError as error:
            faults.add('model_wrapper_cfg.mesh', str(error))


def _check_files(cfg: dict, faults: Faults) -> None:
    load_from = cfg.get('load_from')
    is_missing = (
        isinstance(load_from, str) and '://' not in load_from and not os.path.exists(os.path.expanduser(load_from))
    )
    # Rank 0 reads it. A run that torchrun starts again may have removed what it once began with.
    if is_missing and is_on_first_node() and not has_saved_before(cfg.get('work_dir')):
        origin = ', from which --resume or resume=True should go on' if cfg.get('resume') else ''
        faults.add('load_from', f'no checkpoint at {load_from}{origin}')
    # A checkpoint without resume may be there to be tested alone, without the training data.
    will_train = cfg.get('train_dataloader') is not None and (load_from is None or cfg.get('resume'))
    for path, advice in missing_data(cfg, ('train', 'val') if will_train else ()):
        faults.add(path, advice)


def _check_saving(cfg: dict, config: ZeroConfig, faults: Faults) -> None:
    saving = read_checkpoint_config(cfg.get('checkpoint'), faults)
    if saving.format != 'sharded':
        return
    hooks = cfg.get('default_hooks')
    hook = hooks.get('checkpoint') if isinstance(hooks, Mapping) else None
    if not isinstance(hook, Mapping):
        return
    path, why = 'default_hooks.checkpoint', "with checkpoint=dict(format='sharded')"
    if hook.get('published_keys') is not None and saving.export is None:
        faults.add(f'{path}.published_keys', f"publishes a .pth; {why} say export='last' or 'best' beside it")
    if saving.export == 'best' and not hook.get('save_best'):
        faults.add('checkpoint.export', f"got 'best', and {path}.save_best is not set; set it, or use 'last'")
    for name in ('backend_args', 'file_client_args'):
        if hook.get(name) is not None:
            faults.add(f'{path}.{name}', f'{why} ranks write into a folder of a file system; remove it')
    if '://' in str(hook.get('out_dir') or ''):
        faults.add(f'{path}.out_dir', f'got {hook["out_dir"]!r}; {why} it has to be a folder of a file system')


def _world_size(launcher: str, faults: Faults) -> int | None:
    if launcher not in LAUNCHERS:
        faults.add('launcher', f'got {launcher!r}{near_names(str(launcher), LAUNCHERS)}')
        return None
    started = int(os.environ.get('WORLD_SIZE', 1)) if dist.is_torchelastic_launched() else 1
    if launcher == 'none' and started > 1 and not dist.is_initialized():
        faults.add(
            'launcher', f"torchrun started {started} processes, but the launcher is 'none'; add --launcher pytorch"
        )
        return None
    try:
        return world_size_of(launcher)
    except ValueError as error:
        faults.add('launcher', str(error))
        return None


def missing_data(cfg: dict, splits: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Find annotation files on this machine's disk that are not there.

    Args:
        cfg (dict): Arguments of the runner and keys of the config.
        splits (Sequence[str]): Which of 'train', 'val' and 'test' will be used.

    Yields:
        tuple[str, str]: Config path, and what is missing and what to do.
    """
    seen = set()
    for path, holder in _holders_of_annotations(cfg, splits):
        ann_file, root = holder.get('ann_file'), holder.get('data_root') or ''
        if not isinstance(ann_file, str) or not isinstance(root, str) or not ann_file or '://' in root + ann_file:
            continue
        full = os.path.join(root, ann_file)
        if not os.path.exists(full) and full not in seen:
            seen.add(full)
            yield f'{path}.ann_file', f'no file at {full}; put the data set there, or set data_root'


def _holders_of_annotations(cfg: dict, splits: Sequence[str]) -> Iterator[tuple[str, dict]]:
    for split in splits:
        yield from _datasets(cfg.get(f'{split}_dataloader'), f'{split}_dataloader')
        metrics = cfg.get(f'{split}_evaluator')
        for metric in metrics if isinstance(metrics, (list, tuple)) else [metrics]:
            if isinstance(metric, dict):
                yield f'{split}_evaluator', metric


def _datasets(cfg: Any, path: str) -> Iterator[tuple[str, dict]]:
    """Data set configs below a data loader, also inside wrappers such as RepeatDataset or ConcatDataset."""
    if not isinstance(cfg, dict):
        return
    children = [(f'{path}.dataset', cfg.get('dataset'))]
    several = cfg.get('datasets')
    if isinstance(several, (list, tuple)):
        children += [(f'{path}.datasets[{i}]', item) for i, item in enumerate(several)]
    for child_path, child in children:
        if isinstance(child, dict):
            yield child_path, child
            yield from _datasets(child, child_path)
