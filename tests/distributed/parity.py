"""The parity suite: one training under stock DDP, the same under settings of mmzero, and how far they are apart.

``python -m tests.distributed.parity`` runs all cells and prints the table of docs/parity.md.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from mmengine.optim import DefaultOptimWrapperConstructor
from torch import nn

from tests.distributed.ranks import run_ranks
from tests.distributed.training import Record, compare, distance, train
from tests.models import (
    DINO_BLOCKS,
    TinyDecoder,
    TinyViT,
    ToyModel,
    detection_batch,
    image_batch,
    tiny_dino,
    token_batch,
    toy_batch,
)

# The design's bounds in fp32: each loss and norm; the first gradients, per tensor with their floor; the update after
# all steps over the model, and per tensor.
BOUNDS = dict(loss=1e-6, norm=1e-6, grad=1e-6, update=1e-5, tensor=1e-4)

# Model, batches, classes that are units, wrapper fields that it needs.
MODELS: dict[str, tuple[Callable, Callable, tuple[str, ...], dict]] = {
    'vit': (TinyViT, image_batch, ('Layer',), {}),
    'decoder': (TinyDecoder, token_batch, ('Layer',), {}),
    'toy': (ToyModel, toy_batch, ('Block',), dict(find_unused_parameters=True)),
    'dino': (tiny_dino, detection_batch, DINO_BLOCKS, {}),
}
SETTINGS = {f'stage {stage}': dict(stage=stage) for stage in range(4)}
HSDP = {f'stage {stage}, 2x2': dict(stage=stage, mesh=dict(replicate=2)) for stage in (1, 2, 3)}
# Its units are its own; what it cannot do is not in the models and clippings of its cells.
DEEPSPEED = {f'deepspeed, stage {stage}': dict(stage=stage, engine='deepspeed') for stage in (1, 2, 3)}
CLIPS = {'norm': dict(max_norm=0.1), 'value': dict(type='value', clip_value=0.01)}
# Micro-batches: 6 by 4 has a short last group.
ACCUMULATIONS = {1: 5, 4: 6}


# What the tests measured, for the summary at the end of a test run: cells, then cells in 16 bit.
MEASURED: list[tuple[tuple[str, ...], dict[str, float]]] = []
MEASURED_HALF: list[tuple[tuple[str, ...], dict[str, float]]] = []
# The same by feature, see parity_features.
MEASURED_FEATURES: list[tuple[tuple[str, ...], dict[str, float]]] = []
MEASURED_HALF_FEATURES: list[tuple[tuple[str, ...], dict[str, float]]] = []
FEATURE_HEADS = ('feature', 'ranks', 'setting')
HEADS = ('model', 'ranks', 'setting', 'units')


@dataclass(frozen=True)
class Cell:
    """One training to compare.

    Args:
        setting (str): A key of SETTINGS, HSDP or DEEPSPEED.
        units (str): 'blocks', or 'root': the whole model is one unit.
        accumulation (int): A key of ACCUMULATIONS.
        clip (str): A key of CLIPS.
        optimizer (str): A key of OPTIMIZERS.
        model (str): A key of MODELS.
    """

    setting: str
    units: str
    accumulation: int
    clip: str
    optimizer: str
    model: str

    @property
    def reference(self) -> 'Cell':
        """What of the cell matters under DDP."""
        return replace(self, setting='ddp', units='')

    def row(self, world_size: int) -> tuple[str, ...]:
        """What identifies it in a table."""
        return (self.model, str(world_size), self.setting, self.units)

    def wrapper(self) -> dict:
        """Fields of the model wrapper; empty for stock DDP."""
        if self.setting == 'ddp':
            return {}
        _, _, classes, needs = MODELS[self.model]
        if self.setting in DEEPSPEED:
            return dict(DEEPSPEED[self.setting])
        policy = dict(type='ModuleClassPolicy', classes=list(classes)) if self.units == 'blocks' else None
        fields_ = dict({**SETTINGS, **HSDP}[self.setting], wrap_policy=policy, **needs)
        if fields_['stage'] == 0:
            # [Note: buckets of DDP] It orders its buckets by this, and with it the sums over ranks; the reference
            # sets it. Stock DDP differs from itself by 8e-4 of DINO's update on four ranks otherwise.
            fields_['find_unused_parameters'] = True
        return fields_

    def run(self, **changes: Any) -> Record:
        """Train on this rank."""
        build, batch, _, _ = MODELS[self.model]
        optim = dict(clip_grad=CLIPS[self.clip], accumulative_counts=self.accumulation, **changes.pop('optim', {}))
        wrapper = {**self.wrapper(), **changes.pop('wrapper', {})}
        if not wrapper and self.model == 'dino':
            # DDP refuses re-entrant checkpointing together with unused parameters.
            build = _dino_without_cp
        steps = ACCUMULATIONS[self.accumulation]
        return train(build, batch, OPTIMIZERS[self.optimizer], wrapper, optim, steps, **changes)


def _dino_without_cp() -> nn.Module:
    return tiny_dino(with_cp=False)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """As a config builds it: by paramwise_cfg, a group per parameter."""
    heads = dict(head=dict(lr_mult=0.3, decay_mult=0.5))
    # Tied weights are met twice.
    paramwise = dict(norm_decay_mult=0.0, bias_lr_mult=2.0, custom_keys=heads, bypass_duplicate=True)
    return _optimizer(model, dict(type='AdamW', lr=1e-3, weight_decay=0.05), paramwise)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """One group, with momentum."""
    return _optimizer(model, dict(type='SGD', lr=0.05, momentum=0.9, weight_decay=0.01), None)


def _optimizer(model: nn.Module, optimizer: dict, paramwise: dict | None) -> torch.optim.Optimizer:
    return DefaultOptimWrapperConstructor(dict(type='OptimWrapper', optimizer=optimizer), paramwise)(model).optimizer


OPTIMIZERS = dict(adamw=adamw, sgd=sgd)


def all_cells(model: str, world_size: int) -> list[Cell]:
    """The whole product of what a cell can be.

    Args:
        model (str): A key of MODELS.
        world_size (int): Meshes of replicas need 4 ranks.

    Returns:
        list[Cell]: The cells.
    """
    settings = [*SETTINGS, *(HSDP if world_size == 4 else ())]
    choices = itertools.product(settings, ('blocks', 'root'), ACCUMULATIONS, CLIPS, OPTIMIZERS)
    cells = [Cell(*choice, model) for choice in choices]
    # DDP knows no units.
    return [cell for cell in cells if cell.setting != 'stage 0' or cell.units == 'blocks']


def deepspeed_cells(models: Iterable[str]) -> list[Cell]:
    """The whole product of what a cell on DeepSpeed can be.

    Args:
        models (Iterable[str]): Keys of MODELS.

    Returns:
        list[Cell]: The cells.
    """
    choices = itertools.product(DEEPSPEED, ('root',), ACCUMULATIONS, ('norm',), OPTIMIZERS, models)
    return [Cell(*choice) for choice in choices]


def covering(cells: Sequence[Any]) -> list[Any]:
    """Few cells that hold every pair of choices that all of them hold (pairwise testing), found greedily.

    Args:
        cells (Sequence): The cells to choose from, of one dataclass.

    Returns:
        list: The chosen ones.
    """
    names = [field.name for field in fields(cells[0])]

    def pairs(cell: Any) -> set:
        values = asdict(cell)
        return {((a, values[a]), (b, values[b])) for a, b in itertools.combinations(names, 2)}

    open_pairs = set().union(*map(pairs, cells))
    chosen = []
    while open_pairs:
        best = max(cells, key=lambda cell: len(pairs(cell) & open_pairs))
        chosen.append(best)
        open_pairs -= pairs(best)
    return chosen


def on_rank(cells: Sequence[Cell]) -> list[dict[str, float]]:
    """Runs on every rank: the distance of each cell from DDP, which runs once for alike cells."""
    reference = cache(Cell.run)
    return [compare(cell.run(), reference(cell.reference)) for cell in cells]


def distances(world_size: int, cells: Sequence[Cell]) -> dict[Cell, dict[str, float]]:
    """Run cells in one spawn.

    Args:
        world_size (int): Number of ranks.
        cells (Sequence[Cell]): The cells.

    Returns:
        dict[Cell, dict[str, float]]: The largest distance over the ranks, by cell and quantity.
    """
    # Alike references one after the other, so that each is run once.
    ordered = sorted(cells, key=lambda cell: asdict(cell.reference).__repr__())
    ranks = run_ranks(world_size, on_rank, ordered)
    return {
        cell: {what: max(rank[index][what] for rank in ranks) for what in BOUNDS} for index, cell in enumerate(ordered)
    }


def faults(found: Mapping[Any, dict[str, float]]) -> list[str]:
    """What lies out of the design's bounds."""
    return [
        f'{cell}: {what} {values[what]:.1e} > {bound:.0e}'
        for cell, values in found.items()
        for what, bound in BOUNDS.items()
        if not values[what] <= bound
    ]


def beyond_bounds(world_size: int, cells: Sequence[Cell]) -> list[str]:
    """Run cells, show them at the end of the test run, and say what lies out of the bounds."""
    found = distances(world_size, cells)
    MEASURED.extend((cell.row(world_size), values) for cell, values in found.items())
    return faults(found)


# A 16-bit run may be this much farther from fp32 DDP than DDP under autocast is.
HALF_BOUND = 1.5


def half_on_rank(cells: Sequence[Cell], dtype: str, seeds: int, stored: str | None = None) -> list[dict[str, float]]:
    """Runs on every rank: distances to fp32 DDP of DDP under autocast, then of each cell, summed over seeds.

    Args:
        cells (Sequence[Cell]): The cells.
        dtype (str): Of autocast.
        seeds (int): Runs of each.
        stored (str, optional): Of the units' parameters. Defaults to None: that of autocast.
    """
    sums: dict[Cell | None, Counter] = defaultdict(Counter)
    optim: dict[str, Any] = dict(dtype=dtype)
    if dtype == 'float16':
        # torch's first scale skips the first steps of some.
        optim['loss_scale'] = dict(init_scale=2.0**8)
    for seed in range(seeds):
        exact = cells[0].reference.run(seed=seed)
        sums[None].update(distance(cells[0].reference.run(seed=seed, optim=optim), exact))
        for cell in cells:
            found = cell.run(seed=seed, optim=optim, wrapper=dict(precision=dict(param_dtype=stored or dtype)))
            sums[cell].update(distance(found, exact))
    return [dict(sums[cell]) for cell in (None, *cells)]


def half_precision(
    world_size: int, model: str, settings: Sequence[str], dtype: str = 'bfloat16', seeds: int = 5
) -> dict[Cell, dict]:
    """Compare 16 bit with what DDP under autocast does.

    Args:
        world_size (int): Number of ranks.
        model (str): A key of MODELS.
        settings (Sequence[str]): Keys of SETTINGS or HSDP.
        dtype (str): 'bfloat16', or 'float16' with a scaled loss. Defaults to 'bfloat16'.
        seeds (int): Runs of each. Defaults to 5.

    Returns:
        dict[Cell, dict[str, float]]: Ratios of distances to fp32 DDP, in the mean over seeds and ranks: a rank sees its
            own losses alone, and single ones come as near as chance has it.
    """
    cells = [
        Cell(setting, 'root' if setting in DEEPSPEED else 'blocks', 1, 'norm', 'adamw', model) for setting in settings
    ]
    ranks = run_ranks(world_size, half_on_rank, cells, dtype, seeds)
    by_hand, *found = (
        {what: sum(rank[i][what] for rank in ranks) for what in ranks[0][i]} for i in range(len(ranks[0]))
    )
    return {
        cell: {what: total / by_hand[what] for what, total in sums.items()}
        for cell, sums in zip(cells, found, strict=True)
    }


def half_row(cell: Cell, world_size: int, dtype: str) -> tuple[str, ...]:
    """What identifies a cell of 16 bit in a table."""
    model, ranks, setting, units = cell.row(world_size)
    return (model, ranks, f'{setting}, {dtype}', units)


def _shown(value: float) -> str:
    return f'{value:.1e}' if value < 0.01 else f'{value:.2f}'


def table(rows: Iterable[tuple[tuple[str, ...], dict[str, float]]], heads: Sequence[str]) -> str:
    """A Markdown table of the largest distance per row, with the number of cells behind it.

    Args:
        rows (Iterable): What identifies a row, and the distances of one cell; alike ones are joined.
        heads (Sequence[str]): Titles of the identifying columns.

    Returns:
        str: The table.
    """
    joined: dict[tuple[str, ...], list[dict[str, float]]] = defaultdict(list)
    for key, values in rows:
        joined[key].append(values)
    names = list(next(iter(joined.values()))[0])
    lines = ['| ' + ' | '.join([*heads, 'cells', *names]) + ' |', '|---' * (len(heads) + 1 + len(names)) + '|']
    for key, group in joined.items():
        worst = [_shown(max(values[name] for values in group)) for name in names]
        lines.append('| ' + ' | '.join([*key, str(len(group)), *worst]) + ' |')
    return '\n'.join(lines)


def report() -> str:
    """The tables of what was measured so far; empty before."""
    parts = []
    exact, half = (
        'Largest distance from stock DDP, fp32',
        '16 bit: distance from fp32 DDP over that of DDP under autocast',
    )
    for title, rows, heads in (
        (exact, MEASURED, HEADS),
        (f'{half}, mean of 5 seeds', MEASURED_HALF, HEADS),
        (f'{exact}, by feature', MEASURED_FEATURES, FEATURE_HEADS),
        (f'{half}, mean of 5 seeds, by feature', MEASURED_HALF_FEATURES, FEATURE_HEADS),
    ):
        if rows:
            parts.append(f'{title}\n\n{table(sorted(rows, key=lambda row: row[0]), heads)}')
    return '\n\n'.join(parts)


def main() -> None:
    """Run the whole suite and print its tables, as docs/proof.md holds them."""
    for model, world_size in itertools.product(MODELS, (1, 2, 4)):
        cells = all_cells(model, world_size)
        # A cell of DINO takes as long as twenty of the others.
        found = distances(world_size, covering(cells) if model == 'dino' else cells)
        MEASURED.extend((cell.row(world_size), values) for cell, values in found.items())
    for model, world_size, dtype in itertools.product(('vit', 'decoder', 'dino'), (2, 4), ('bfloat16', 'float16')):
        half = half_precision(world_size, model, [*SETTINGS, *(HSDP if world_size == 4 else ())], dtype)
        MEASURED_HALF.extend((half_row(cell, world_size, dtype), values) for cell, values in half.items())
    print(report())


if __name__ == '__main__':
    main()
