"""Shards in host memory under a mesh of GPUs, on fake tensors: no kernel mixes devices, no collective sees the CPU."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmzero._compat import dtensor_as_it_is
from mmzero.config import LossScale
from mmzero.engines import accept_whole_tensors
from mmzero.engines.fsdp2.clip import total_norm
from mmzero.engines.fsdp2.host_step import step_on_host
from mmzero.engines.fsdp2.views import Held, OneByOne
from mmzero.engines.gradients import any_nonfinite, norms_by_part
from mmzero.engines.local_parts import LocalParts
from mmzero.engines.loss_scaler import LossScaler
from mmzero.engines.state import Whole, _scatter_entry, gather, scatter

GPU = torch.device('cuda', 0)


class OnlyOfGPU(TorchDispatchMode):
    """Notes collectives, and refuses those of tensors in host memory, as NCCL does."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh, self.count = mesh, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            # What it does inside comes here again.
            return NotImplemented
        if func.namespace in ('c10d', '_c10d_functional') and 'wait' not in func.__name__:
            self.note(tree_leaves(args)[0])
        return func(*args, **(kwargs or {}))

    def note(self, tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        """Stand for a collective in place, whose end a fake GPU cannot tell."""
        assert tensor.device.type == 'cuda', 'a collective of a tensor in host memory'
        self.count += 1


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> Iterator[OnlyOfGPU]:
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 0)
    dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=2)
    try:
        # Its ranks have to be real numbers.
        mesh = init_device_mesh('cuda', (2,), mesh_dim_names=('shard',))
        with FakeTensorMode(), OnlyOfGPU(mesh) as mode:
            for name in ('all_reduce', 'broadcast'):
                monkeypatch.setattr(dist, name, mode.note)
            yield mode
    finally:
        dist.destroy_process_group()


def shard(mesh: DeviceMesh) -> Any:
    """Half of a matrix, in host memory, with its gradient."""
    like = DTensor.from_local(torch.ones(4, 3, device=GPU), mesh, [Shard(0)], run_check=False)
    made = nn.Parameter(dtensor_as_it_is(torch.ones(4, 3), like))
    made.grad = dtensor_as_it_is(torch.ones(4, 3), like)
    return made


def both(mesh: DeviceMesh) -> list[Any]:
    """A shard in host memory, and a parameter that is whole on the GPU."""
    whole = nn.Parameter(torch.ones((), device=GPU))
    whole.grad = torch.ones((), device=GPU)
    return [shard(mesh), whole]


def is_plain(tensor: torch.Tensor) -> bool:
    """Fake tensors are a subclass, as quantised ones are."""
    return not isinstance(tensor, DTensor)


class Rows(torch.optim.Optimizer):
    """Scales by what it keeps of each row, so that it needs whole tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group['params']:
                rows = self.state[param].setdefault('rows', torch.zeros_like(param.narrow(1, 0, 1)))
                rows.add_(param.grad.square().mean(1, keepdim=True))
                self.state[param]['last'] = param.grad.clone()
                param.sub_(group['lr'] * param.grad / rows)


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_fake_devices_do_not_mix(collectives: OnlyOfGPU) -> None:
    with pytest.raises(RuntimeError, match='same device'):
        torch.ones(2) + torch.ones(2, device=GPU)
    with pytest.raises(AssertionError, match='host memory'):
        dist.all_reduce(torch.ones(2))


def test_saved_and_loaded(collectives: OnlyOfGPU) -> None:
    param = shard(collectives.mesh)
    whole = gather(param)
    assert whole.shape == (8, 3)
    assert whole.device.type == 'cpu'
    scatter(param, whole)
    entry = _scatter_entry(param, Whole((8, 3), torch.float32), whole)
    assert local(entry).device.type == 'cpu'
    assert local(entry).shape == (4, 3)
    assert collectives.count == 3


def test_whole_weights_are_loaded(collectives: OnlyOfGPU) -> None:
    model = nn.Linear(3, 8, bias=False)
    model.weight = shard(collectives.mesh)
    accept_whole_tensors(model)
    model.load_state_dict(dict(weight=torch.zeros(8, 3)))
    assert local(model.weight).device.type == 'cpu'
    assert collectives.count == 0


def test_a_mirror_has_the_same_memory(collectives: OnlyOfGPU) -> None:
    model = nn.Linear(3, 8, bias=False)
    model.weight = shard(collectives.mesh)
    parts = LocalParts(model)
    sharded = parts._sharded('weight', parts.module.weight.detach())
    assert local(sharded).untyped_storage()._cdata == parts.module.weight.untyped_storage()._cdata
    parts.module.weight.data.copy_(torch.zeros(4, 3))


@pytest.mark.parametrize('norm_type', [1.0, 2.0, float('inf')])
def test_norms_are_on_the_gpu(collectives: OnlyOfGPU, norm_type: float) -> None:
    params = both(collectives.mesh)
    norm = total_norm(params, norm_type)
    parts = norms_by_part(dict(all=params, one=params[:1]), norm_type, GPU)
    assert {value.device for value in (norm, *parts.values())} == {GPU}
    assert collectives.count == (3 if math.isinf(norm_type) else 2)
    for param in params:
        torch.nn.utils.clip_grads_with_norm_([param], 1.0, norm)


def test_what_is_not_finite_is_found(collectives: OnlyOfGPU) -> None:
    params = both(collectives.mesh)
    assert any_nonfinite(params, GPU, sharded=True).device == GPU
    assert collectives.count == 1


def test_gradients_are_scaled_back(collectives: OnlyOfGPU) -> None:
    # Without a GPU torch's own constructor turns one for a GPU off.
    scaler = LossScaler(torch.device('cpu'), LossScale())
    optimizer = torch.optim.SGD(both(collectives.mesh), lr=0.1)
    scaler._unscale_grads_(optimizer, torch.ones((), device=GPU), torch.zeros((), device=GPU), False)
    assert scaler._overflow.device == GPU
    assert collectives.count == 1


@pytest.mark.parametrize('name', ['Adam', 'AdamW', 'RMSprop'])
def test_state_lies_beside_its_parameter(collectives: OnlyOfGPU, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('mmzero.engines.fsdp2.views._is_plain', is_plain)
    optimizer = getattr(torch.optim, name)(both(collectives.mesh), lr=0.1)
    for _ in range(2):
        step_on_host(lambda: Held().step(optimizer), optimizer)
    for param, entries in optimizer.state.items():
        for key, value in entries.items():
            if key != 'step':
                assert local(value).device == local(param).device, key
                assert value.shape == param.shape, key
    assert all(group['fused'] is None for group in optimizer.param_groups if 'fused' in group)
    assert collectives.count == 0


def test_whole_tensors_are_on_the_gpu(collectives: OnlyOfGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('mmzero.engines.fsdp2.views._is_plain', is_plain)
    params = [shard(collectives.mesh)]
    optimizer = Rows(params, dict(lr=0.1))
    OneByOne().step(optimizer)
    state = optimizer.state[params[0]]
    # As loaded state lies.
    state['rows'] = state['rows'].cpu()
    OneByOne().step(optimizer)
    assert state['rows'].shape == (8, 1)
    assert state['last'].to_local().shape == (4, 3)
    assert {local(params[0]).device.type, state['last'].device.type} == {'cpu'}


def test_tensors_in_host_memory_are_not_shown_as_shards(collectives: OnlyOfGPU) -> None:
    from mmzero.engines.fsdp2.trial import _views_of

    assert [type(view) for view in _views_of(shard(collectives.mesh))] == [Held, OneByOne]
