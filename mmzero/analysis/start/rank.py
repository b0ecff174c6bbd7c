"""A process of a measured start: ``python -m mmzero.analysis.start.rank WAY CONFIG WORK_DIR SOURCE [PATH]``.

It says 'ready' once all is imported, goes on when a line comes in, says 'done N', with the bytes of the model, once the
model could be trained, and waits again.
"""

import copy
import importlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from mmengine.config import Config
from mmengine.registry import DATASETS
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import Dataset

from mmzero.analysis.sweep.reduction import without_pretrained
from mmzero.checkpoint.convert import convert_checkpoint
from mmzero.engines import init_process_group
from mmzero.runner import ZeroRunner, load_config

WAYS = ('mmzero', 'stock')
"""What starts: ZeroRunner with the config as it is, or MMEngine's Runner under DDP, with another base."""
SOURCES = ('random', 'init_cfg', 'pth', 'safetensors', 'sharded')
"""Where weights come from: nowhere, ``init_cfg`` of the backbone, ``load_from`` a file or a folder."""
WRITE = 'write'
"""In place of a way: a process that writes the files."""


@DATASETS.register_module()
class NoData(Dataset):
    """A data set of which nothing is asked, so that no file is needed."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return index


def prepared(config: str, work_dir: str, source: str, path: str | None) -> Config:
    """Read a config, with its weights from a source and without data.

    Args:
        config (str): Path or name of the config.
        work_dir (str): Where its logs go.
        source (str): One of :data:`SOURCES`.
        path (str, optional): The file or folder.

    Returns:
        Config: The config.
    """
    cfg = load_config(config)
    cfg.model = without_pretrained(cfg.model)
    if source == 'init_cfg':
        cfg.model.backbone.init_cfg = dict(type='Pretrained', checkpoint=path, prefix='backbone.')
        if 'convert_weights' in cfg.model.backbone:
            # What is written has the names of mmdet's Swin.
            cfg.model.backbone.convert_weights = False
    cfg.load_from = path if source in SOURCES[2:] else None
    cfg.work_dir, cfg.launcher = work_dir, 'pytorch'
    cfg.train_dataloader = dict(
        batch_size=1,
        num_workers=0,
        dataset=dict(type=f'mmengine.{NoData.__name__}'),
        sampler=dict(type='DefaultSampler'),
    )
    for split in ('val', 'test'):
        for part in ('dataloader', 'cfg', 'evaluator'):
            cfg.pop(f'{split}_{part}', None)
    return cfg


def start_mmzero(cfg: Config) -> nn.Module:
    """Start as ``train`` does, up to the first iteration.

    Args:
        cfg (Config): The config.

    Returns:
        nn.Module: The sharded model.
    """
    runner: Any = ZeroRunner.from_cfg(cfg)
    # Else nothing would be initialised where a whole model is loaded.
    runner._training = True
    runner.prepare()
    runner.load_or_resume()
    return runner.model


def start_stock(cfg: Config) -> nn.Module:
    """Start as MMEngine's Runner does under DDP, up to the first iteration.

    Args:
        cfg (Config): The config; what is mmzero's goes.

    Returns:
        nn.Module: The model in DDP.
    """
    dist.init_process_group('gloo')
    for name in ('runner_type', 'activation_checkpointing', 'checkpoint'):
        cfg.pop(name, None)
    cfg.model_wrapper_cfg = dict(type='MMDistributedDataParallel', device_ids=None, broadcast_buffers=False)
    cfg.default_hooks.pop('visualization', None)
    cfg.env_cfg.dist_cfg = dict(backend='gloo')
    # Building changes it.
    runner: Any = Runner.from_cfg(copy.deepcopy(cfg))
    runner._init_model_weights()
    runner.load_or_resume()
    return runner.model


def write_files(cfg: Config, folder: str) -> None:
    """Write the weights of the model in every format, for :data:`SOURCES`.

    Args:
        cfg (Config): The config.
        folder (str): Where.
    """
    init_process_group()
    runner: Any = ZeroRunner.from_cfg(cfg)
    torch.save(dict(state_dict=runner.model.state_dict()), f'{folder}/weights.pth')
    for name in ('weights.safetensors', 'weights'):
        convert_checkpoint(f'{folder}/weights.pth', f'{folder}/{name}')


def _hold(word: str) -> None:
    print(word, flush=True)
    sys.stdin.readline()


def main() -> None:
    """Be a rank, or write."""
    way, config, work_dir, source, *path = sys.argv[1:]
    cfg = prepared(config, work_dir, source, path[0] if path else None)
    # What a default scope imports when the first object is built.
    for name in (cfg.get('default_scope'), 'mmdet', 'mmcv'):
        if name and importlib.util.find_spec(name) is not None:
            importlib.import_module(f'{name}.models' if name != 'mmcv' else name)
    if way == WRITE:
        write_files(cfg, work_dir)
        return
    _hold('ready')
    model = dict(zip(WAYS, (start_mmzero, start_stock), strict=True))[way](cfg)
    _hold(f'done {sum(param.numel() * param.element_size() for param in model.parameters())}')
    # Without waiting for others.
    os._exit(0)


if __name__ == '__main__':
    main()
