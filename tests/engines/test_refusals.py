"""What is refused up front is what the bare engine cannot do either."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from mmzero.config import Faults, read_zero_config
from mmzero.engines import Loop, build_engine, init_process_group
from mmzero.errors import ConfigError, PlanError


@contextmanager
def fake_ranks(world_size: int) -> Iterator[DeviceMesh]:
    """This process as rank 0 of so many that are not there."""
    dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield init_device_mesh('cpu', (world_size,))
    finally:
        dist.destroy_process_group()


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


def test_fully_shard_cannot_reshard_another_dimension_to_part_of_the_ranks() -> None:
    """Why ``shard_dim`` is refused beside a number in ``reshard_after_forward``."""
    with fake_ranks(4) as mesh:
        layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=2, shard_placement_fn=lambda param: Shard(-1))
        fully_shard(layers, mesh=mesh)
        loss = layers(torch.ones(2, 8)).sum()
        with pytest.raises(IndexError):
            loss.backward()


def test_fully_shard_refuses_another_dimension_that_does_not_divide() -> None:
    """Why such parameters are split along dim 0."""
    with fake_ranks(4) as mesh, pytest.raises(NotImplementedError, match='uneven sharding on dim 1'):
        fully_shard(nn.Linear(6, 8), mesh=mesh, shard_placement_fn=lambda param: Shard(param.dim() - 1))


@pytest.mark.parametrize('dtype', [None, torch.float32])
def test_a_16_bit_override_needs_autocast(dtype):
    config = read_zero_config(dict(overrides=[dict(units='a', param_dtype='bfloat16')]), 'model_wrapper_cfg', Faults())
    with pytest.raises(ConfigError, match=r'overrides\[0\].param_dtype: units gathered in torch.bfloat16 .*pass --amp'):
        build_engine(config).check_autocast(dtype)


def test_an_engine_that_cannot_follow_says_what_to_do() -> None:
    """As DeepSpeed's, in val and test of ranks with different numbers of batches."""
    init_process_group()
    engine = build_engine(read_zero_config(dict(stage=0), 'model_wrapper_cfg', Faults()))
    try:
        with (
            engine.following_forwards(Loop('val'), [True]) as follow,
            pytest.raises(PlanError, match=r'DDPEngine cannot take part .* round_up=True'),
        ):
            follow()
    finally:
        dist.destroy_process_group()
