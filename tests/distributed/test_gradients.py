"""Clipping and accumulation over shards are those of DDP: on three ranks, of which some hold nothing of a weight."""

import copy
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.logging import MessageHub
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import OptimWrapper
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero.engines.fsdp2.clip import total_norm
from tests.distributed.cases import Faults, merged, refused
from tests.distributed.ranks import run_ranks
from tests.distributed.training import full
from tests.models import ToyModel, toy_batch

pytestmark = pytest.mark.distributed

STAGES = (0, 1, 2, 3)
BLOCKS = dict(type='ModuleClassPolicy', classes=['Block'])
NORM_TYPES = (1, 2, 3.0, 'inf')
_numbers = itertools.count()


class Short(ToyModel):
    """ToyModel, which has frozen, tied, unused and 0-dim parameters, with one of two rows."""

    def __init__(self) -> None:
        super().__init__(depth=1)
        self.short = nn.Linear(12, 2)

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        return super().forward(inputs + self.short(inputs).sum(1, keepdim=True), labels, mode)


def train(fields: dict | None, optim: dict, steps: int = 2, done: int = 0, disturb: bool = False) -> dict[str, Any]:
    """Train by stock DDP, or by the pair where fields are given.

    SGD: Adam would hide a gradient that was scaled wrongly.

    Args:
        fields (dict, optional): The wrapper's.
        optim (dict): The optimizer wrapper's.
        steps (int): Micro-batches of the whole run.
        done (int): Those that an earlier run did.
        disturb (bool): Evaluate and gather, as for a checkpoint, between all micro-batches.
    """
    torch.manual_seed(0)
    net = Short()
    if fields is None:
        model: Any = MMDistributedDataParallel(
            net, device_ids=None, broadcast_buffers=False, find_unused_parameters=True
        )
    else:
        model = ZeroModelWrapper(module=net, find_unused_parameters=True, **fields)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    wrapper = (OptimWrapper if fields is None else ZeroOptimWrapper)(optimizer, **copy.deepcopy(optim))
    wrapper.message_hub = MessageHub(f'gradients {next(_numbers)}')
    wrapper.initialize_count_status(model, done, steps)
    losses = []
    for index in range(done, steps):
        data = toy_batch(index * dist.get_world_size() + dist.get_rank())
        losses.append(float(model.train_step(data, wrapper)['loss'].detach()))
        if disturb and fields is not None:
            with torch.no_grad():
                model.val_step(toy_batch(0))
            model.engine.model_state(), wrapper.state_dict()
    scalars = wrapper.message_hub.log_scalars
    norms = list(scalars['train/grad_norm'].data[0]) if 'train/grad_norm' in scalars else []
    return dict(losses=losses, norms=norms, after={name: full(param) for name, param in net.named_parameters()})


def compare(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """By the design's table: losses and norms within 1e-6, the update as a whole within 1e-5."""
    torch.manual_seed(0)
    before = dict(Short().named_parameters())
    faults = []
    for what in ('losses', 'norms'):
        pairs = list(zip(found[what], wanted[what], strict=True))
        worst = max([0.0, *(abs(a - b) / abs(b) for a, b in pairs)])
        faults += [f'{what} are {worst:.0e} off'] if not worst <= 1e-6 else []
    moved = torch.cat([(value - before[name]).flatten() for name, value in wanted['after'].items()]).norm()
    off = torch.cat([(value - found['after'][name]).flatten() for name, value in wanted['after'].items()]).norm()
    return faults + ([f'the update is {off / moved:.0e} off'] if not off <= 1e-5 * moved else [])


def cells(stage: int) -> list[dict]:
    """Wrapper fields: units of blocks and the root, or one unit; gradients reduced each time or once."""
    more = [dict(stage=3, wrap_policy=None), dict(stage=3, wrap_policy=BLOCKS, no_sync=True)]
    return [dict(stage=stage, wrap_policy=BLOCKS), *(more if stage == 3 else [])]


def norms(stages: Sequence[int], clips: Sequence[dict], **fields: Any) -> Faults:
    """Clipping by each norm, and by value."""
    found: Faults = {f'norms {stage}': [] for stage in stages}
    for clip in clips:
        optim = dict(clip_grad=clip)
        wanted = train(None, optim)
        for stage in stages:
            for cell in cells(stage):
                faults = compare(train({**cell, **fields}, optim), wanted)
                found[f'norms {stage}'] += [f'{clip}, {cell}: {fault}' for fault in faults]
    return found


def groups(stages: Sequence[int], ways: Sequence[tuple[int, int, bool]], **fields: Any) -> Faults:
    """Groups of micro-batches with a short last one; from the middle of one; with what happens between them."""
    found: Faults = {f'groups {stage}': [] for stage in stages}
    for counts, done, disturb in ways:
        optim = dict(accumulative_counts=counts, clip_grad=dict(max_norm=0.05))
        steps = 2 * counts - 1
        wanted = train(None, optim, steps, done)
        for stage in stages:
            for cell in cells(stage):
                faults = compare(train({**cell, **fields}, optim, steps, done, disturb), wanted)
                said = f'{counts}, {done} done, {"disturbed, " if disturb else ""}{cell}'
                found[f'groups {stage}'] += [f'{said}: {fault}' for fault in faults]
    return found


CLIPS = [dict(max_norm=0.01, norm_type=norm_type) for norm_type in (1, 2, 'inf')] + [
    dict(type='value', clip_value=0.01)
]
MORE_CLIPS = [
    dict(max_norm=0.01, norm_type=3.0),
    dict(max_norm=0.01, foreach=False),
    dict(max_norm=1e6),
    dict(type='value', clip_value=0.01, foreach=False),
]
# Micro-batches of a step, done before in a run that is resumed, and whether it is evaluated and saved in between.
WAYS = [(2, 0, True), (3, 1, False), (4, 0, False)]
ALL_WAYS = list(itertools.product((2, 3, 4), (0, 1), (False, True)))


def not_a_number() -> list[str]:
    """One that a single rank holds is in every rank's norm, and refused on every rank where that is asked for."""
    mesh = init_device_mesh('cpu', (dist.get_world_size(),))
    faults = []
    for norm_type, value in itertools.product(NORM_TYPES, (float('nan'), float('inf'))):
        whole = torch.ones(dist.get_world_size(), 2)
        whole[-1, 0] = value
        param = nn.Parameter(distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)]))
        scalar = nn.Parameter(torch.tensor(1.0))
        param.grad, scalar.grad = distribute_tensor(whole, mesh, [Shard(0)]), torch.tensor(1.0)
        norm = total_norm([param, scalar], float(norm_type))
        if str(float(norm)) != str(value):
            faults.append(f'norm {norm_type} of {value} is {norm}')
    for stage, norm_type in itertools.product(STAGES, NORM_TYPES):
        model = ZeroModelWrapper(module=Short(), stage=stage, find_unused_parameters=True)
        clip = dict(max_norm=1.0, norm_type=norm_type, error_if_nonfinite=True)
        optim = ZeroOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), clip_grad=clip)
        batch = toy_batch(0)
        batch['inputs'] *= float('nan') if dist.get_rank() == dist.get_world_size() - 1 else 1.0
        with refused(faults, RuntimeError, f'the gradient norm of order {float(norm_type)} is nan'):
            model.train_step(batch, optim)
    return faults


def run_cases() -> Faults:
    return {**norms(STAGES, CLIPS), **groups(STAGES, WAYS), 'not a number': not_a_number()}


@pytest.fixture(scope='module')
def found() -> Faults:
    return merged(run_ranks(3, run_cases))


@pytest.mark.parametrize('case', [f'{case} {stage}' for case in ('norms', 'groups') for stage in STAGES])
def test_gradients_are_those_of_ddp(found: Faults, case: str) -> None:
    assert not found[case], '\n'.join(found[case])


def test_a_number_that_is_none_reaches_all_ranks(found: Faults) -> None:
    assert not found['not a number'], '\n'.join(found['not a number'])


def thoroughly(stages: Sequence[int], **fields: Any) -> Faults:
    return {**norms(stages, [*CLIPS, *MORE_CLIPS], **fields), **groups(stages, ALL_WAYS, **fields)}


def on_a_mesh() -> Faults:
    return thoroughly((1, 2, 3), mesh=dict(replicate=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    'function, ranks', [(run_cases, 1), (functools.partial(thoroughly, STAGES), 2), (on_a_mesh, 4)]
)
def test_gradients_on_other_numbers_of_ranks(function: Any, ranks: int) -> None:
    for case, faults in merged(run_ranks(ranks, function)).items():
        assert not faults, case + '\n' + '\n'.join(faults)
