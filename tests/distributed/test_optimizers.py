"""Each optimizer steps shards as it steps whole tensors under DDP, or is refused with what it does otherwise."""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero.errors import CheckpointError, ConfigError
from tests import optimizers
from tests.distributed import parity
from tests.distributed.cases import Faults, differing, merged, refused
from tests.distributed.parity import BOUNDS
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Record, compare, full, train
from tests.models import ToyModel, toy_batch

pytestmark = pytest.mark.distributed

BLOCKS = dict(type='ModuleClassPolicy', classes=['Block'])
HELD, SHARDS, ONE_BY_ONE = 'Held', 'Shards', 'OneByOne'
Build = Callable[[nn.Module], optim.Optimizer]


def of(cls: type, **options: Any) -> Build:
    """On all trained parameters, in two groups of which one does not decay where the optimizer does."""

    def build(net: nn.Module) -> optim.Optimizer:
        params = [param for param in net.parameters() if param.requires_grad]
        decays = [param for param in params if param.dim() > 1]
        rest = dict(params=[param for param in params if param.dim() <= 1])
        if options.get('weight_decay'):
            rest['weight_decay'] = 0.0
        return cls([dict(params=decays), rest], **copy.deepcopy(options))

    return build


def matrices(cls: type, **options: Any) -> Build:
    return lambda net: cls([p for p in net.parameters() if p.dim() == 2 and p.requires_grad], **options)


def tensor_lr(cls: type, **options: Any) -> Build:
    return lambda net: of(cls, lr=torch.tensor(1e-2), **options)(net)


TORCH: dict[str, tuple[Build, str]] = {
    'ASGD': (of(optim.ASGD, lr=0.05), HELD),
    'Adadelta': (of(optim.Adadelta, lr=0.5), HELD),
    'Adafactor': (of(optim.Adafactor, lr=1e-2), ONE_BY_ONE),
    'Adagrad': (of(optim.Adagrad, lr=1e-2), HELD),
    'Adam': (of(optim.Adam, lr=1e-2, amsgrad=True), HELD),
    'AdamW': (of(optim.AdamW, lr=1e-2, weight_decay=0.05), HELD),
    'Adamax': (of(optim.Adamax, lr=1e-2), HELD),
    'Muon': (matrices(optim.Muon, lr=1e-2), ONE_BY_ONE),
    'NAdam': (of(optim.NAdam, lr=1e-2), HELD),
    'RAdam': (of(optim.RAdam, lr=1e-2), HELD),
    'RMSprop': (of(optim.RMSprop, lr=1e-3, momentum=0.9, centered=True), HELD),
    'Rprop': (of(optim.Rprop, lr=1e-3), HELD),
    'SGD': (of(optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01), HELD),
}
KERNELS: dict[str, tuple[Build, str]] = {
    'AdamW, fused': (of(optim.AdamW, lr=1e-2, fused=True), HELD),
    'SGD, fused': (of(optim.SGD, lr=0.05, momentum=0.9, fused=True), HELD),
    'Adagrad, fused': (of(optim.Adagrad, lr=1e-2, fused=True), HELD),
    'AdamW, foreach': (of(optim.AdamW, lr=1e-2, foreach=True), HELD),
    'SGD, foreach': (of(optim.SGD, lr=0.05, momentum=0.9, foreach=True), HELD),
    'Rprop, foreach': (of(optim.Rprop, lr=1e-3, foreach=True), HELD),
    'Adafactor, foreach': (of(optim.Adafactor, lr=1e-2, foreach=True), ONE_BY_ONE),
    'AdamW, lr a tensor': (tensor_lr(optim.AdamW), HELD),
    'SGD, lr a tensor': (tensor_lr(optim.SGD, momentum=0.9), HELD),
}
OWN: dict[str, tuple[Build, str]] = {
    'each element by itself': (of(optimizers.Plain, lr=1e-3), HELD),
    'norms': (of(optimizers.LambLike, lr=1e-2), SHARDS),
    'a number in the group': (of(optimizers.Counting, lr=0.1), SHARDS),
    'blocks of 256 elements': (of(optimizers.InBlocks, lr=1e-2), ONE_BY_ONE),
    'factors of matrices': (of(optimizers.Factored, lr=1e-2), SHARDS),
}
REFUSED: dict[str, tuple[Build, tuple[str, ...]]] = {
    'LBFGS': (lambda net: optim.LBFGS(net.parameters()), ('LBFGS.step needs a closure',)),
    'a closure': (of(optimizers.NeedsClosure), ('NeedsClosure.step needs a closure',)),
    'SparseAdam': (of(optim.SparseAdam), ('fails on a few whole tensors', 'dense gradients')),
    'a median of all': (
        of(optimizers.Median),
        ('Median', 'as plain tensors: moves', 'whole tensors, one by one: moves'),
    ),
}
ALL = {**TORCH, **KERNELS, **OWN}


def fields(stage: int, **changes: Any) -> dict:
    return dict(stage=stage, wrap_policy=BLOCKS, find_unused_parameters=True, **changes)


def run(build: Build, wrapper: dict, **changes: Any) -> Record:
    return train(ToyModel, toy_batch, build, wrapper, dict(clip_grad=dict(max_norm=1.0)), **changes)


def distances(names: Sequence[str], settings: Sequence[dict]) -> list[tuple[str, dict, dict[str, float]]]:
    """Runs on every rank: how far each optimizer is from DDP."""
    found = []
    for name in names:
        build, _ = ALL[name]
        reference = run(build, {})
        for wrapper in settings:
            found.append((name, wrapper, compare(run(build, wrapper), reference)))
    return found


if __name__ == '__main__':
    import sys

    dist.init_process_group('gloo')
    for name, wrapper, values in (
        row for n in (sys.argv[2:] or list(ALL)) for row in distances([n], [fields(int(s)) for s in sys.argv[1]])
    ):
        if dist.get_rank() == 0:
            print(name, wrapper['stage'], {k: f'{v:.0e}' for k, v in values.items()}, flush=True)
