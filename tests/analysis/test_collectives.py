"""The counter sees what DDP, FSDP2 and DTensor say to other ranks, against traffic known beforehand."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from mmzero.analysis.collectives import Collective, CollectiveLog
from tests.distributed.ranks import run_ranks

# Dim 0 divides by 2 and 4 ranks, so that nothing is padded.
WIDTH, DEPTH = 8, 3
UNIT = WIDTH * WIDTH + WIDTH
WHOLE = DEPTH * UNIT


@pytest.mark.parametrize(
    'kind, expected',
    [
        ('all_gather', 75),
        ('reduce_scatter', 75),
        ('all_reduce', 150),
        ('broadcast', 75),
        ('reduce', 75),
        ('gather', 18.75),
        ('scatter', 18.75),
        ('all_to_all', 75),
        ('send', 100),
        ('recv', 0),
        ('barrier', 0),
        ('other:new', 75),
    ],
)
def test_elements_moved(kind: str, expected: float) -> None:
    assert Collective(kind, 100, 4, 4).moved == expected


def test_a_group_of_one_moves_nothing() -> None:
    for kind in ('all_gather', 'reduce_scatter', 'all_reduce', 'broadcast', 'gather', 'all_to_all'):
        assert Collective(kind, 100, 4, 1).moved == 0


def test_syncs_are_counted() -> None:
    tensor = torch.tensor([1.0, 0.0])
    with CollectiveLog() as log:
        _ = float(tensor[0]), tensor[1].item(), bool(tensor[0] > 0)
        _ = tensor.nonzero(), tensor[tensor > 0], tensor[[0]], torch.equal(tensor, tensor)
        _ = tensor.cpu(), tensor.tolist(), tensor.numpy(), tensor.to(torch.float64)
    assert log.syncs == Counter(_local_scalar_dense=3, nonzero=1, mask=1, equal=1, cpu=1, tolist=1, numpy=1)
    assert log.calls == []


def test_nothing_is_counted_outside() -> None:
    with CollectiveLog() as log:
        pass
    float(torch.ones(()))
    assert not log.syncs


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])


def steps(model: nn.Module, number: int = 3) -> list[Collective]:
    """The collectives of the last of some steps: DDP settles its buckets in the first two."""
    for _ in range(number):
        with CollectiveLog() as log:
            model(torch.randn(2, WIDTH)).sum().backward()
        model.zero_grad()
    return log.calls


def sharded(mesh: tuple[int, ...], reshard_after_forward: bool) -> nn.Module:
    model, names = net(), ('replicate', 'shard')[-len(mesh) :]
    device_mesh = init_device_mesh('cpu', mesh, mesh_dim_names=names)
    for layer in model:
        fully_shard(layer, mesh=device_mesh, reshard_after_forward=reshard_after_forward)
    return fully_shard(model, mesh=device_mesh, reshard_after_forward=reshard_after_forward)


def operators() -> list[Collective]:
    """Each collective of torch.distributed once, and what DTensor does by itself."""
    n, rank = dist.get_world_size(), dist.get_rank()
    part, parts = torch.ones(4), [torch.empty(4) for _ in range(n)]
    with CollectiveLog() as log:
        dist.all_gather(parts, part)
        dist.reduce_scatter(torch.empty(4), parts)
        dist.all_reduce(part)
        dist.broadcast(part, 0)
        dist.reduce(part, 0)
        dist.gather(part, parts if rank == 0 else None, 0)
        dist.scatter(part, parts if rank == 0 else None, 0)
        dist.all_to_all_single(torch.empty(4 * n), torch.ones(4 * n))
        dist.send(part, 1) if rank == 0 else dist.recv(part, 0)
        dist.barrier()
    return log.calls


def dtensors() -> list[Collective]:
    mesh = init_device_mesh('cpu', (dist.get_world_size(),))
    tensor = distribute_tensor(torch.ones(8, 3), mesh, [Shard(0)])
    with CollectiveLog() as log:
        tensor.full_tensor()
        tensor.grad = tensor.clone()
        assert isinstance(torch.nn.utils.clip_grad_norm_([tensor], 1.0), DTensor)
    return log.calls


def on_two_ranks() -> dict[str, list[Collective]]:
    ddp = nn.parallel.DistributedDataParallel(net())
    found = dict(ddp=steps(ddp), kept=steps(sharded((2,), False)), freed=steps(sharded((2,), True)))
    with ddp.no_sync():
        found['no sync'] = steps(ddp)
    return dict(found, operators=operators(), dtensors=dtensors())


@pytest.mark.distributed
def test_traffic_on_two_ranks() -> None:
    ranks = run_ranks(2, on_two_ranks)
    gather, scatter = Collective('all_gather', UNIT, 4, 2), Collective('reduce_scatter', UNIT, 4, 2)
    kinds = ('all_gather', 'reduce_scatter', 'all_reduce', 'broadcast', 'reduce', 'gather', 'scatter', 'all_to_all')
    sizes = (8, 8, 4, 4, 4, 8, 8, 8)
    raw = [Collective(kind, size, 4, 2) for kind, size in zip(kinds, sizes, strict=True)]
    for rank, found in enumerate(ranks):
        # Gradients in DDP's one bucket, from the C++ reducer.
        assert found['ddp'] == [Collective('all_reduce', WHOLE, 4, 2)]
        assert found['no sync'] == []
        assert Counter(found['kept']) == {gather: DEPTH, scatter: DEPTH}
        assert Counter(found['freed']) == {gather: 2 * DEPTH, scatter: DEPTH}
        point_to_point = Collective('recv' if rank else 'send', 4, 4, 2)
        assert found['operators'] == [*raw, point_to_point, Collective('barrier', 0, 1, 2)]
        gathered, norm = found['dtensors']
        assert gathered == Collective('all_gather', 24, 4, 2)
        assert norm == Collective('all_reduce', 1, 4, 2)


def on_a_mesh() -> list[Collective]:
    return steps(sharded((2, 2), True))


@pytest.mark.slow
@pytest.mark.distributed
def test_traffic_of_hybrid_sharding() -> None:
    found = Counter(run_ranks(4, on_a_mesh)[3])
    # Half of each gradient remains after the reduce-scatter, and is summed over the replicas.
    assert found == {
        Collective('all_gather', UNIT, 4, 2): 2 * DEPTH,
        Collective('reduce_scatter', UNIT, 4, 2): DEPTH,
        Collective('all_reduce', UNIT // 2, 4, 2): DEPTH,
    }
    # The formula of ZeRO-3 over the shard group, and the replicas' part.
    assert sum(call.moved * times for call, times in found.items()) == 3 * WHOLE / 2 + WHOLE / 2
