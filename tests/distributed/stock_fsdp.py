"""Real checkpoints of MMEngine's FSDPStrategy, made on CPUs."""

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from mmengine._strategy.fsdp import FSDPStrategy
from mmengine.runner import FlexibleRunner
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    _optim_utils,
)
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.distributed.detector import Backbone, Detector
from tests.vectors import loader

# Offloading to the CPU, as 'full' does, leaves nothing of what is on the CPU already.
FULL = dict(
    state_dict_type='FULL_STATE_DICT',
    state_dict_config=dict(type='FullStateDictConfig'),
    optim_state_dict_config=dict(type='FullOptimStateDictConfig'),
)
KINDS: dict[str, tuple[Any, bool]] = {
    'full': (FULL, True),
    'full, flat': (FULL, False),
    'local': ('local', True),
    'local, flat': ('local', False),
}
"""How it saves, and ``use_orig_params``."""

_GATHER_STATES = _optim_utils._allgather_orig_param_states

# Groups of parameters need them by themselves.
PARAMWISE = {True: dict(norm_decay_mult=0.0, bypass_duplicate=True), False: None}
SCHEDULER = dict(type='LinearLR', begin=0, end=4, by_epoch=True)


class TiedDetector(Detector):
    """With a buffer, and a weight that has two names."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.tied = torch.nn.Linear(12, 7)
        self.tied.weight = self.head.weight
        self.register_buffer('mean', torch.rand(3))


def optim_wrapper(use_orig_params: bool) -> dict:
    """The same for it and for mmzero."""
    optimizer = dict(type='AdamW', lr=0.01, weight_decay=0.1)
    return dict(type='OptimWrapper', optimizer=optimizer, paramwise_cfg=PARAMWISE[use_orig_params])


def _copied_states(*args: Any, **kwargs: Any) -> Any:
    """As torch's function, which gathers each entry into the same memory and takes it from a GPU in between."""
    views = FlatParamHandle._get_unflat_views_aligned

    def copies(*args: Any) -> list[torch.Tensor]:
        return [view.clone() for view in views(*args)]

    with patch.object(FlatParamHandle, '_get_unflat_views_aligned', copies):
        return _GATHER_STATES(*args, **kwargs)


def train_by_fsdp(folder: str) -> None:
    """Train by FlexibleRunner with FSDPStrategy once per kind: ``FOLDER/KIND/epoch_1.pth`` and ``truth.pth``."""
    init = FullyShardedDataParallel.__init__

    def on_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        # The strategy gives the number of a GPU.
        init(self, *args, **{**kwargs, 'device_id': torch.device('cpu')})

    for kind, (state_dict_cfg, use_orig_params) in KINDS.items():
        # Ranks start from the same weights: FSDP1 sends none between CPUs.
        torch.manual_seed(0)
        wrapper = dict(
            type='MMFullyShardedDataParallel',
            use_orig_params=use_orig_params,
            auto_wrap_policy=ModuleWrapPolicy({Backbone}),
        )
        with (
            patch.object(FullyShardedDataParallel, '__init__', on_cpu),
            patch.object(_optim_utils, '_allgather_orig_param_states', _copied_states),
            patch.object(FSDPStrategy, '_setup_distributed', lambda *args, **kwargs: None),
        ):
            runner = FlexibleRunner(
                model=TiedDetector(),
                work_dir=f'{folder}/{kind}',
                train_dataloader=loader(),
                train_cfg=dict(by_epoch=True, max_epochs=1),
                optim_wrapper=optim_wrapper(use_orig_params),
                param_scheduler=SCHEDULER,
                strategy=dict(type='FSDPStrategy', state_dict_cfg=state_dict_cfg, model_wrapper=wrapper),
                default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=1)),
                experiment_name=f'fsdp {folder} {kind}',
                log_level='ERROR',
            )
            runner.train()
            _save_truth(runner, f'{folder}/{kind}/truth.pth')


def _save_truth(runner: FlexibleRunner, path: str) -> None:
    """What its model and optimizer hold, by FSDP's own gathering."""
    model = runner.strategy.model
    whole = FullStateDictConfig(), FullOptimStateDictConfig()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *whole):
        state = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = FullyShardedDataParallel.optim_state_dict(model, runner.strategy.optim_wrapper.optimizer)
    if dist.get_rank() == 0:
        torch.save(dict(state_dict=state, optimizer=optimizer), path)
    dist.barrier()
