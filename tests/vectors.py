"""Complete runs on vectors: no detector, no files, a second or two each."""

import itertools
from typing import Any

import torch
from mmengine.evaluator import BaseMetric
from torch.utils.data import Dataset

from mmzero import ZeroRunner
from tests.models import ToyModel, toy_batch

_numbers = itertools.count()


class Vectors(Dataset):
    """Inputs and labels for ToyModel."""

    def __init__(self, size: int = 6) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: value[0] for name, value in toy_batch(index, size=1).items()}


class Count(BaseMetric):
    """Counts predictions."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += [1] * len(data_samples)

    def compute_metrics(self, results: list) -> dict[str, int]:
        return dict(count=len(results))


def loader(dataset: Dataset | None = None, **sampler: Any) -> dict:
    """A data loader config."""
    return dict(
        dataset=dataset or Vectors(),
        batch_size=2,
        num_workers=0,
        sampler=dict(type='DefaultSampler', shuffle=False, **sampler),
        collate_fn=dict(type='default_collate'),
    )


def vector_runner(
    work_dir: Any, model: Any = None, stage: int = 3, wrapper: dict | None = None, **changes: Any
) -> ZeroRunner:
    """Build a ZeroRunner directly, without a config file."""
    settings: dict[str, Any] = dict(
        train_dataloader=loader(),
        val_dataloader=loader(),
        test_dataloader=loader(),
        train_cfg=dict(by_epoch=True, max_epochs=1, val_interval=1),
        val_cfg=dict(),
        test_cfg=dict(),
        val_evaluator=dict(type=Count),
        test_evaluator=dict(type=Count),
        optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=0.01)),
        randomness=dict(seed=0),
        experiment_name=f'vectors {next(_numbers)}',
        log_level='ERROR',
        cfg=dict(model_wrapper_cfg=dict(type='ZeroModelWrapper', stage=stage, **(wrapper or {}))),
    )
    settings.update(changes)
    return ZeroRunner(model=model or ToyModel(), work_dir=str(work_dir), **settings)
