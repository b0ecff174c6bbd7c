"""What is refused up front is what the bare engine cannot do either."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mmzero.engines import init_process_group


@pytest.fixture
def sharded(group: None) -> nn.Module:
    init_process_group('none')
    return fully_shard(nn.Linear(2, 2), mesh=init_device_mesh('cpu', (1,)))


def test_a_sharded_model_cannot_be_copied_as_emahook_does(sharded: nn.Module) -> None:
    with pytest.raises(AssertionError, match='does not support deepcopy'):
        copy.deepcopy(sharded)


def test_fully_shard_refuses_0_dim_parameters(group: None) -> None:
    """Why engines/fsdp2/replicated.py is there."""
    init_process_group('none')
    module = nn.Linear(2, 2)
    module.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match='scalar parameters'):
        fully_shard(module, mesh=init_device_mesh('cpu', (1,)))


def test_sync_bn_refuses_cpu_tensors(group: None) -> None:
    init_process_group('none')
    with pytest.raises(ValueError, match='SyncBatchNorm expected input tensor to be on'):
        nn.SyncBatchNorm(3)(torch.rand(2, 3, 4, 4))
