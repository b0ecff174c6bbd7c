"""Every stage trains as stock DDP does, within the design's table "Equal to what, within what"."""

from typing import Any

import pytest
import torch

from mmzero import _compat
from tests.distributed import parity
from tests.distributed.parity import MODELS, Cell, all_cells, covering, faults, half_precision
from tests.distributed.ranks import run_ranks
from tests.models import ToyModel, toy_batch

pytestmark = pytest.mark.distributed

NEEDS_NATIVE = pytest.mark.skipif(not _compat.HAS_REDUCE_SCATTER_UNUSED_PARAMS, reason='torch >= 2.13')
SMALL = ('vit', 'decoder', 'toy')
DTYPES = ('bfloat16', 'float16')


def check(world_size: int, cells: list[Cell]) -> None:
    wrong = parity.beyond_bounds(world_size, cells)
    assert not wrong, '\n'.join(wrong)


@pytest.mark.parametrize('world_size', [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_covering_set(world_size: int) -> None:
    """Every pair of setting, units, accumulation, clipping, optimizer and model is in one of the cells."""
    models = tuple(MODELS) if world_size == 2 else SMALL
    check(world_size, covering([cell for model in models for cell in all_cells(model, world_size)]))


@pytest.mark.slow
@pytest.mark.parametrize('world_size', [1, 2, 4])
@pytest.mark.parametrize('model', SMALL)
def test_all_cells(world_size: int, model: str) -> None:
    check(world_size, all_cells(model, world_size))


@pytest.mark.slow
@pytest.mark.parametrize('world_size', [1, 2, 4])
def test_dino(world_size: int) -> None:
    """A covering set: a cell of DINO takes as long as twenty of the others."""
    check(world_size, covering(all_cells('dino', world_size)))


def check_half(world_size: int, model: str, settings: list[str], dtype: str) -> None:
    found = half_precision(world_size, model, settings, dtype)
    parity.MEASURED_HALF += [(parity.half_row(cell, world_size, dtype), values) for cell, values in found.items()]
    for cell, values in found.items():
        assert max(values.values()) <= parity.HALF_BOUND, (cell, values)


@pytest.mark.parametrize('dtype', ['bfloat16', pytest.param('float16', marks=pytest.mark.slow)])
def test_16_bit_stays_as_close_to_fp32_as_ddp_does(dtype: str) -> None:
    check_half(2, 'vit', ['stage 1', 'stage 3'], dtype)


@pytest.mark.slow
@pytest.mark.parametrize('model', ['vit', 'decoder', 'dino'])
@pytest.mark.parametrize('world_size', [1, 2, 4])
@pytest.mark.parametrize('dtype', DTYPES)
def test_16_bit_at_every_setting(world_size: int, model: str, dtype: str) -> None:
    check_half(world_size, model, [*parity.SETTINGS, *(parity.HSDP if world_size == 4 else ())], dtype)


def rank_dependent(native: bool) -> list[str]:
    """A layer that runs on rank 0 alone, and one that runs nowhere; by torch's own means or those for older ones."""
    _compat.fsdp2.HAS_REDUCE_SCATTER_UNUSED_PARAMS = native
    MODELS['branching'] = (Branching, toy_batch, ('Block',), dict(find_unused_parameters=True))
    settings = [(setting, 'blocks') for setting in parity.SETTINGS] + [('stage 3', 'root')]
    cells = [Cell(setting, units, 1, 'norm', 'adamw', 'branching') for setting, units in settings]
    return faults(dict(zip(cells, parity.on_rank(cells), strict=True)))


class Branching(ToyModel):
    """Adds a layer that only rank 0 uses; it lies in the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = torch.nn.Linear(12, 12)

    def forward(self, inputs: torch.Tensor, labels: Any = None, mode: str = 'tensor') -> Any:
        if torch.distributed.get_rank() == 0:
            inputs = inputs + self.sometimes(inputs)
        return super().forward(inputs, labels, mode)


@pytest.mark.parametrize('native', [False, pytest.param(True, marks=NEEDS_NATIVE)])
def test_parameters_used_on_one_rank_only(native: bool) -> None:
    assert run_ranks(2, rank_dependent, native) == [[], []]
