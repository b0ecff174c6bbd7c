"""Step 1: every fault of a config at once, before a process group or a GPU is touched."""

import copy
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from mmengine.registry import MODELS, DefaultScope
from torch import nn

from mmzero._compat import build_with_meta_parameters
from mmzero.config import Faults, ZeroConfig, read_zero_config
from mmzero.engines import LAUNCHERS, build_engine, world_size_of
from mmzero.errors import DataError, PlanError, near_names
from mmzero.patches import apply_patches
from mmzero.policies import build_policy
from mmzero.runner.translate import refuse_keys, wrapper_fields


def check_config(cfg: dict, optim_wrapper: Any, faults: Faults) -> None:
    """Check everything that can be told from the config, the environment and the model's structure.

    Args:
        cfg (dict): Arguments of the runner and keys of the config.
        optim_wrapper (dict or OptimWrapper, optional): The translated optimizer wrapper.
        faults (Faults): Faults found so far, which are raised along with those found here.

    Raises:
        ConfigError: If there is a fault.
    """
    refuse_keys(cfg, faults)
    config = read_zero_config(wrapper_fields(cfg, optim_wrapper), 'model_wrapper_cfg', faults)
    world_size = _world_size(cfg.get('launcher', 'none'), faults)
    if world_size is not None:
        try:
            config.mesh.sizes(world_size)
        except ValueError as error:
            faults.add('model_wrapper_cfg.mesh', str(error))
    load_from = cfg.get('load_from')
    if isinstance(load_from, str) and '://' not in load_from and not os.path.isfile(load_from):
        faults.add('load_from', f'no checkpoint at {load_from}')
    # A checkpoint without resume may be there to be tested alone, without the training data.
    will_train = cfg.get('train_dataloader') is not None and (load_from is None or cfg.get('resume'))
    for path, advice in missing_data(cfg, ('train', 'val') if will_train else ()):
        faults.add(path, advice)
    _check_model(cfg, config, faults)
    faults.raise_if_any()


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
        if not isinstance(ann_file, str) or not ann_file or '://' in root + ann_file:
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


def check_same_number_of_batches(count: int, name: str) -> None:
    """Refuse data loaders of different lengths, with which ranks would wait for each other for ever. Collective.

    Args:
        count (int): This rank's number of batches.
        name (str): The config key of the data loader.

    Raises:
        DataError: On every rank, if they differ.
    """
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, count)
    if len(set(counts)) > 1:
        raise DataError(
            f'{name}: ranks have {", ".join(map(str, counts))} batches, and a sharded model needs the same number on '
            "each; use a sampler that fills up, such as dict(type='DefaultSampler', round_up=True), whose repeats the "
            'evaluators drop'
        )


def _datasets(cfg: Any, path: str) -> Iterator[tuple[str, dict]]:
    """Data set configs below a data loader, also inside wrappers such as RepeatDataset or ConcatDataset."""
    if not isinstance(cfg, dict):
        return
    children = [(f'{path}.dataset', cfg.get('dataset'))]
    children += [(f'{path}.datasets[{i}]', item) for i, item in enumerate(cfg.get('datasets') or [])]
    for child_path, child in children:
        if isinstance(child, dict):
            yield child_path, child
            yield from _datasets(child, child_path)


def _check_model(cfg: dict, config: ZeroConfig, faults: Faults) -> None:
    model = cfg['model']
    if not isinstance(model, nn.Module):
        model = _build_on_meta(model, cfg, faults)
    if model is None:
        return
    try:
        plan = build_policy(config.wrap_policy)(model)
        build_engine(config).check_plan(model, plan)
    except (PlanError, ValueError) as error:
        faults.add('model_wrapper_cfg.wrap_policy', str(error))
    try:
        apply_patches(model, config.activation_checkpointing).undo()
    except (PlanError, ValueError) as error:
        faults.add('activation_checkpointing', str(error).removeprefix('activation_checkpointing: '))
    on_cpu = not torch.cuda.is_available()
    if on_cpu and cfg.get('launcher', 'none') != 'none' and _has_sync_bn(cfg, model):
        faults.add('sync_bn' if cfg.get('sync_bn') else 'model', 'SyncBatchNorm needs GPUs; use BatchNorm (BN) on CPUs')


def _build_on_meta(model: dict, cfg: dict, faults: Faults) -> nn.Module | None:
    random_state = torch.get_rng_state()
    model = copy.deepcopy(model)
    if cfg.get('data_preprocessor') is not None:
        model.setdefault('data_preprocessor', copy.deepcopy(cfg['data_preprocessor']))
    try:
        with DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mmengine')):
            built = build_with_meta_parameters(lambda: MODELS.build(copy.deepcopy(model)))
    except (KeyError, TypeError, ValueError, AssertionError, ImportError) as error:
        faults.add('model', f'cannot be built: {error}')
        return None
    finally:
        torch.set_rng_state(random_state)
    for path in _hidden_modules(built):
        faults.add('model', f'{path} holds a module outside of the module tree, which is not supported yet')
    return built


def _hidden_modules(model: nn.Module) -> list[str]:
    """Modules kept where torch does not see them; their weights would stay on meta on ranks other than 0."""
    known = set(model.modules())
    return [
        f'{name}.{attribute}'.lstrip('.')
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, nn.Module) and value not in known and any(p.is_meta for p in value.parameters())
    ]


def _has_sync_bn(cfg: dict, model: nn.Module) -> bool:
    return bool(cfg.get('sync_bn')) or any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules())
