"""The parity suite's cells by feature: what bites, one thing at a time, at every stage, beside stock DDP.

``python -m tests.distributed.parity_features`` runs all cells and prints the tables of docs/proof.md.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.distributed import parity
from tests.distributed.ranks import run_ranks
from tests.distributed.test_keep_fp32 import Residual
from tests.distributed.test_odd_parameters import Tiny
from tests.distributed.test_parity import Branching
from tests.distributed.training import Record, compare, distance, train
from tests.models import TinyDecoder, TinyViT, ToyModel, image_batch, token_batch, toy_batch

SCALE = dict(init_scale=2.0**8)


class Frozen(TinyViT):
    """Its first parts are frozen, a layer, and a norm inside of another."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.patch, self.layers[0], self.layers[2].norm1):
            part.requires_grad_(False)
        self.cls_token.requires_grad = False


class Scaled(TinyViT):
    """With a 0-dim parameter in the root."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        return super().forward(inputs * self.scale, labels, mode)


class Penalised(ToyModel):
    """Its loss has a penalty on the gradient at the inputs, whose backward goes through the blocks once more."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Identity()

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        inputs = inputs.detach().requires_grad_()
        found = super().forward(inputs, labels, mode)
        (slope,) = torch.autograd.grad(found['loss'], inputs, create_graph=True)
        return dict(found, loss_slope=slope.square().sum())


@dataclass(frozen=True)
class Feature:
    """One thing that a model or a step may have.

    Args:
        name (str): How it is called in the table.
        build (Callable): Builds the model.
        batch (Callable): Makes a batch from a seed.
        units (str): The class of the units.
        wrapper (dict): Fields of the model wrapper, of stages 1 to 3.
        optim (dict): Fields of the optimizer wrapper, of the reference, too.
        stages (tuple[int, ...]): Where it can be.
        steps (int): Micro-batches.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], dict]
    units: str
    wrapper: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = (0, 1, 2, 3)
    steps: int = 5
    optimizer: str = 'adamw'

    def run(self, setting: str, **changes: Any) -> Record:
        """Train on this rank, by stock DDP where the setting is 'ddp'.

        Args:
            setting (str): A key of parity.SETTINGS, parity.HSDP or parity.DEEPSPEED, or 'ddp'.
            **changes: ``seed``, and ``optim`` in place of the feature's.
        """
        fields: dict[str, Any] = {}
        if setting in parity.DEEPSPEED:
            fields = parity.DEEPSPEED[setting] | self.wrapper
        elif setting != 'ddp':
            fields = dict({**parity.SETTINGS, **parity.HSDP}[setting])
            fields['wrap_policy'] = dict(type='ModuleClassPolicy', classes=[self.units])
            # Of stage 0 for the order of DDP's buckets, as parity.Cell has it.
            fields |= self.wrapper if fields['stage'] else dict(find_unused_parameters=True)
        optim = dict(dict(clip_grad=dict(max_norm=0.1)), **changes.pop('optim', self.optim))
        return train(self.build, self.batch, parity.OPTIMIZERS[self.optimizer], fields, optim, self.steps, **changes)

    def deepspeed_settings(self) -> list[str]:
        """Stages on DeepSpeed."""
        return [name for name, fields in parity.DEEPSPEED.items() if fields['stage'] in self.stages]

    def settings(self, world_size: int) -> list[str]:
        """Stages, and meshes of replicas on four ranks."""
        found = [f'stage {stage}' for stage in self.stages]
        return found + ([name for name in parity.HSDP if int(name[6]) in self.stages] if world_size == 4 else [])


def precision(dtype: str, **more: Any) -> dict[str, Any]:
    return dict(precision=dict(param_dtype=dtype, **more))


UNUSED = dict(find_unused_parameters=True)
WHOLE = dict(overrides=[dict(units='layers.1', shard=False)])
COLUMNS = dict(overrides=[dict(units='**', shard_dim=1)])
THIRDS = dict(accumulative_counts=3)
HOST = dict(offload=dict(params='cpu', optimizer='cpu'))
FULL = [
    Feature('tied', TinyDecoder, token_batch, 'Layer'),
    Feature('frozen', Frozen, image_batch, 'Layer'),
    Feature('0-dim', Scaled, image_batch, 'Layer'),
    Feature('fewer rows than ranks', functools.partial(Tiny, False), toy_batch, 'Small', optimizer='sgd'),
    Feature('unused on one rank', Branching, toy_batch, 'Block', UNUSED),
    Feature('BatchNorm', Residual, image_batch, 'Stage', optimizer='sgd'),
    Feature('no_sync', TinyViT, image_batch, 'Layer', dict(no_sync=True), dict(accumulative_counts=3), (3,)),
    Feature('penalty on gradients', Penalised, toy_batch, 'Block', optimizer='sgd'),
    Feature('penalty, three micro-batches', Penalised, toy_batch, 'Block', {}, THIRDS, optimizer='sgd'),
    Feature('offloaded', Scaled, image_batch, 'Layer', HOST, stages=(1, 2, 3)),
    Feature('offloaded, three micro-batches', TinyViT, image_batch, 'Layer', HOST, THIRDS, (1, 2, 3)),
    Feature('one unit kept whole', TinyViT, image_batch, 'Layer', WHOLE),
    Feature('sharded along dim 1', TinyViT, image_batch, 'Layer', COLUMNS),
]
KEPT = precision('bfloat16', keep_fp32=['**.norm*'])
BF16, FP16 = dict(dtype='bfloat16'), dict(dtype='float16', loss_scale=SCALE)
ONCE, THREE = dict(precision('bfloat16'), no_sync=True), dict(BF16, accumulative_counts=3)
HALF = [
    Feature('bfloat16', TinyViT, image_batch, 'Layer', precision('bfloat16'), BF16),
    Feature('float16', TinyViT, image_batch, 'Layer', precision('float16'), FP16),
    Feature('keep_fp32', TinyViT, image_batch, 'Layer', KEPT, BF16),
    Feature('BatchNorm, bfloat16', Residual, image_batch, 'Stage', precision('bfloat16'), BF16, optimizer='sgd'),
    Feature('tied, bfloat16', TinyDecoder, token_batch, 'Layer', precision('bfloat16'), BF16),
    Feature('offloaded, bfloat16', TinyViT, image_batch, 'Layer', precision('bfloat16') | HOST, BF16, (1, 2, 3)),
    Feature('offloaded, float16', TinyViT, image_batch, 'Layer', precision('float16') | HOST, FP16, (1, 2, 3)),
    Feature('no_sync, bfloat16', TinyViT, image_batch, 'Layer', ONCE, THREE, (3,)),
]


# What DeepSpeed can, of those above, with names of its own.
ON_DEEPSPEED = [
    Feature('tied', TinyDecoder, token_batch, 'Layer'),
    Feature('frozen', Frozen, image_batch, 'Layer'),
    Feature('BatchNorm', Residual, image_batch, 'Stage', optimizer='sgd'),
    Feature('optimizer offloaded', TinyViT, image_batch, 'Layer', dict(offload=dict(optimizer='cpu'))),
    Feature(
        'offloaded, three micro-batches', TinyViT, image_batch, 'Layer', dict(offload=dict(optimizer='cpu')), THIRDS
    ),
    Feature('all offloaded', TinyViT, image_batch, 'Layer', HOST, THIRDS, stages=(3,)),
    Feature('recomputed', TinyViT, image_batch, 'Layer', dict(activation_checkpointing=['layers.0', 'layers.1'])),
]


def on_rank(cells: Sequence[tuple[Feature, list[str]]]) -> list[dict[str, float]]:
    """Runs on every rank: distances from DDP."""
    found = []
    for feature, settings in cells:
        reference = feature.run('ddp')
        found += [compare(feature.run(setting), reference) for setting in settings]
    return found


def half_on_rank(cells: Sequence[tuple[Feature, list[str]]], seeds: int) -> list[dict[str, tuple[float, float]]]:
    """Runs on every rank: distances from fp32 DDP, and those of DDP under autocast, summed over seeds."""
    found = []
    for feature, settings in cells:
        sums: dict[str, Counter] = {setting: Counter() for setting in ('ddp', *settings)}
        for seed in range(seeds):
            exact = feature.run('ddp', seed=seed, optim=_in_fp32(feature.optim))
            for setting, total in sums.items():
                total.update(distance(feature.run(setting, seed=seed), exact))
        found += [{what: (sums[setting][what], by) for what, by in sums['ddp'].items()} for setting in settings]
    return found


def _in_fp32(optim: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in optim.items() if name not in ('dtype', 'loss_scale')}


def distances(
    world_size: int, features: Sequence[Feature], on_deepspeed: bool = False
) -> dict[tuple[str, ...], dict[str, float]]:
    """The largest distance over the ranks, by row of the table and quantity."""
    cells = [
        (feature, feature.deepspeed_settings() if on_deepspeed else feature.settings(world_size))
        for feature in features
    ]
    ranks = run_ranks(world_size, on_rank, cells)
    rows = [(feature.name, str(world_size), setting) for feature, settings in cells for setting in settings]
    return {row: {what: max(rank[i][what] for rank in ranks) for what in parity.BOUNDS} for i, row in enumerate(rows)}


def beyond_bounds(world_size: int, features: Sequence[Feature], on_deepspeed: bool = False) -> list[str]:
    """Train with features, show the distances at the end of the test run, and say what lies out of the bounds."""
    found = distances(world_size, features, on_deepspeed)
    parity.MEASURED_FEATURES += found.items()
    return parity.faults(found)


def ratios(world_size: int, features: Sequence[Feature], seeds: int = 5) -> dict[tuple[str, ...], dict[str, float]]:
    """Distances over those of DDP under autocast, in the mean over seeds and ranks, by row and quantity."""
    cells = [(feature, feature.settings(world_size)) for feature in features]
    ranks = run_ranks(world_size, half_on_rank, cells, seeds)
    rows = [(feature.name, str(world_size), setting) for feature, settings in cells for setting in settings]
    found = {}
    for row, by_rank in zip(rows, zip(*ranks, strict=True), strict=True):
        mine, theirs = ({what: sum(rank[what][i] for rank in by_rank) for what in by_rank[0]} for i in (0, 1))
        found[row] = {what: mine[what] / theirs[what] for what in mine}
    return found


def main() -> None:
    """Run all cells and print their tables."""
    full = {key: value for world_size in (2, 4) for key, value in distances(world_size, FULL).items()}
    half = {key: value for world_size in (2, 4) for key, value in ratios(world_size, HALF).items()}
    for found in (full, half):
        print(parity.table(sorted(found.items()), parity.FEATURE_HEADS), end='\n\n')


if __name__ == '__main__':
    main()
