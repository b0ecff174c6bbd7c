"""The accounting at full size: DINO with Swin-L, 218 million parameters, every stage, on 2 and 4 ranks.

``pytest -s tests/analysis/test_full_size.py`` prints a line per measurement.
"""

import copy
import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mmengine.config import Config
from torch import nn

from mmzero import ZeroModelWrapper, ZeroOptimWrapper
from mmzero._compat import build_with_meta_parameters
from mmzero.analysis.collectives import CollectiveLog
from mmzero.analysis.step import record_memory, run_step
from mmzero.analysis.weight_copies import WeightCopies
from tests.distributed.ranks import run_ranks
from tests.models import DINO_BLOCKS, detection_batch

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CONFIG = Path(__file__).parents[2] / 'configs' / 'dino_swin_l_digits_zero3.py'
UNITS = dict(type='ModuleClassPolicy', classes=list(DINO_BLOCKS))


def swin_l() -> nn.Module:
    """DINO with Swin-L, real on rank 0 alone."""
    import mmdet.models  # noqa: F401
    from mmengine.registry import MODELS, DefaultScope

    cfg = Config.fromfile(CONFIG).model
    with DefaultScope.overwrite_default_scope('mmdet'):
        if dist.get_rank():
            return build_with_meta_parameters(lambda: MODELS.build(copy.deepcopy(cfg)))
        model = MODELS.build(copy.deepcopy(cfg))
    model.init_weights()
    return model


def measured(stage: int, dtype: str | None) -> list[dict[str, Any]]:
    """Runs on every rank: a first step, then memory with one and with two micro-batches."""
    torch.manual_seed(0)
    model = ZeroModelWrapper(module=swin_l(), stage=stage, wrap_policy=UNITS, precision=dict(param_dtype=dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=True)
    seeds = iter(range(dist.get_rank(), 1000, dist.get_world_size()))

    def batch() -> dict:
        return detection_batch(next(seeds), images=1, size=128)

    copies = WeightCopies()
    with CollectiveLog() as log, copies.watching():
        run_step(model, ZeroOptimWrapper(optimizer, dtype=dtype), batch)
    found = []
    for micro_batches in (1, 2):
        optim = ZeroOptimWrapper(optimizer, accumulative_counts=micro_batches, dtype=dtype)
        memory, forecast = record_memory(model, optim, batch)
        found.append(
            dict(
                stage=stage,
                dtype=dtype,
                micro_batches=micro_batches,
                bytes=max(memory.states),
                forecast=forecast.bytes,
                formula=forecast.formula_bytes,
                peaks=memory.peaks(),
                moved=sum(call.moved for call in log.calls),
                forecast_moved=model.engine.forecast(
                    model.plan, world_size=dist.get_world_size(), micro_batches=1, state_itemsize=8
                ).moved,
                copies=copies.bytes,
                units=model.plan.numel - model.plan.root.numel,
                root=model.plan.root.numel,
                largest=max(unit.numel for unit in model.plan.units[:-1]),
                parameters=model.plan.numel,
            )
        )
        if dist.get_rank() == 0:
            row = found[-1]
            ratio, closed = row['bytes'] / row['forecast'], row['bytes'] / row['formula']
            print(
                f'{dist.get_world_size()} ranks, stage {stage}, {dtype or "float32"}, k={micro_batches}: '
                f'{row["bytes"]:,} bytes, to the forecast {ratio:.4f}, to {forecast.formula} {closed:.3f}; '
                f'traffic {row["moved"] / row["forecast_moved"]:.6f}, weight copies {row["copies"]:,}',
                flush=True,
            )
    del model, optimizer, optim
    gc.collect()
    return found


@pytest.mark.parametrize('dtype', [None, 'bfloat16'])
@pytest.mark.parametrize('world_size', [2, 4])
def test_memory_and_traffic_are_the_formulas(world_size: int, dtype: str | None) -> None:
    # Ranks of their own for each stage: a process does not give back what it once held.
    stages = [run_ranks(world_size, measured, stage, dtype, timeout=7200) for stage in (1, 2, 3)]
    ranks = [sum(rows, []) for rows in zip(*stages, strict=True)]
    for rows in ranks:
        for row in rows:
            assert 0.98 <= row['bytes'] / row['forecast'] <= 1.02, row
            assert 0.99 <= row['moved'] / row['forecast_moved'] <= 1.01, row
    check_differences({(row['stage'], row['micro_batches']): row for row in ranks[0]}, world_size)
    if dtype:
        row = next(row for row in ranks[0] if row['stage'] == 3)
        assert row['copies'] <= 0.02 * 2 * row['units'] + 2 * row['root'], row


def check_differences(rows: dict[tuple[int, int], dict], world_size: int) -> None:
    """Stages differ by what the formulas say that one holds and the other does not."""
    for first, second in itertools.combinations(rows, 2):
        measured_, forecast = (rows[first][what] - rows[second][what] for what in ('bytes', 'forecast'))
        assert measured_ == pytest.approx(forecast, rel=0.02, abs=0.002 * rows[first]['bytes']), (first, second)
    a, units, root = (rows[3, 2][what] for what in ('parameters', 'units', 'root'))
    itemsize = 2 if rows[3, 2]['dtype'] else 4
    # For one micro-batch stages 1 and 2 are the same. For two, stage 1 keeps gradients whole, stage 2 their shards.
    assert rows[1, 1]['bytes'] == pytest.approx(rows[2, 1]['bytes'], rel=0.001)
    whole, sharded = (rows[stage, 2]['peaks']['gradients'] for stage in (1, 2))
    assert whole >= 0.98 * 4 * a
    # Shards, and beside them the whole gradients of one unit and, until it reduces, of the root.
    assert sharded <= 4 * a / world_size + 4 * (rows[2, 2]['largest'] + root)
    # Stages 1 and 2 keep all parameters gathered, stage 3 the root and few units.
    for stage in (1, 2):
        assert rows[stage, 2]['peaks']['gathered'] == pytest.approx(itemsize * units + 4 * root, rel=0.005)
    assert rows[3, 2]['peaks']['gathered'] < 0.4 * rows[2, 2]['peaks']['gathered']
    assert rows[3, 1]['bytes'] < rows[2, 1]['bytes'] < rows[2, 2]['bytes'] < rows[1, 2]['bytes']
