"""Norms that ranks compute together: told before a run where they cannot be, plain ones in a run of one process."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from torch import nn

from mmzero._compat import pretended_process_group
from mmzero.config import Faults
from mmzero.errors import ConfigError
from mmzero.runner.model_check import _check_sync_bn
from tests.detectors import RTMDET, has_full_mmcv
from tests.vectors import vector_runner


class NormedByConfig(BaseModel):
    """A classifier of vectors with a norm of any type."""

    def __init__(self, norm_cfg: dict) -> None:
        super().__init__()
        from mmcv.cnn import build_norm_layer

        self.stem = nn.Linear(12, 12)
        self.norm = build_norm_layer(norm_cfg, 12)[1]
        self.head = nn.Linear(12, 7)

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        x = self.norm(self.stem(inputs)[..., None, None]).flatten(1)
        logits = self.head(x)
        return dict(loss=nn.functional.cross_entropy(logits, labels)) if mode == 'loss' else list(logits)


def model_of(norm: str) -> dict:
    import mmcv.ops  # noqa: F401  (registers MMSyncBN)

    return dict(type=NormedByConfig, norm_cfg=dict(type=norm))


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun tells a process, of two."""
    for name, value in dict(RANK='0', WORLD_SIZE='2', LOCAL_RANK='0').items():
        monkeypatch.setenv(name, value)


@pytest.mark.skipif(torch.cuda.is_available(), reason='GPUs can')
@pytest.mark.parametrize('norm', ['SyncBN', 'MMSyncBN'])
def test_on_cpus_it_is_told_before_the_run(norm: str, two_ranks: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model: norm: SyncBatchNorm needs GPUs; use .*norm_cfg=dict.type='BN'"):
        vector_runner(tmp_path, model_of(norm), launcher='pytorch')


@pytest.mark.skipif(torch.cuda.is_available(), reason='GPUs can')
def test_a_model_that_makes_them_of_plain_ones_on_several_ranks(two_ranks: None, tmp_path: Path) -> None:
    """RTMDet does, unless it is told not to."""
    import mmdet.models  # noqa: F401

    model = copy.deepcopy(RTMDET)
    del model['use_syncbn']
    told = r'model: backbone\.\S+ and \d+ more: SyncBatchNorm needs GPUs; .*in RTMDet use_syncbn=False'
    with pytest.raises(ConfigError, match=told):
        vector_runner(tmp_path, dict(model, _scope_='mmdet'), launcher='pytorch', default_scope='mmdet')


@pytest.mark.parametrize('norm', ['SyncBN', 'MMSyncBN'])
def test_one_process_has_plain_ones(norm: str, group: None, tmp_path: Path) -> None:
    runner = vector_runner(tmp_path, model_of(norm), cfg=dict(sync_bn='torch', model_wrapper_cfg=dict(stage=3)))
    runner.train()
    norms = [layer for name, layer in runner.sharded.module.named_modules() if name == 'norm']
    assert [isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in norms] == [True]
    assert not isinstance(norms[0], nn.SyncBatchNorm)
    assert int(norms[0].num_batches_tracked) == 3


@pytest.mark.skipif(has_full_mmcv(), reason='the full mmcv has them')
def test_mmcvs_own_need_its_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    with pretended_process_group(2):
        model = MODELS.build(model_of('MMSyncBN'))
    for convert, checked, told in (
        (None, model, "model: norm: the SyncBatchNorm of mmcv needs .*norm_cfg=dict.type='SyncBN'"),
        ('mmcv', nn.BatchNorm2d(3), "sync_bn: the SyncBatchNorm of mmcv needs mmcv's .*sync_bn='torch'"),
    ):
        faults = Faults()
        _check_sync_bn(convert, checked, faults)
        with pytest.raises(ConfigError, match=told):
            faults.raise_if_any()
    faults = Faults()
    _check_sync_bn('torch', nn.SyncBatchNorm(3), faults)
    assert not faults.lines
