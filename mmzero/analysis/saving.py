"""How long a save holds the loop: a sharded one that is waited for, one that is written beside, and a full one."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mmzero.analysis.contestants import build_pair
from mmzero.analysis.paired import MedianRatio, median_ratio, timed_rounds
from mmzero.analysis.setting import Setting
from mmzero.analysis.step import run_step
from mmzero.checkpoint import BackgroundSave, save_sharded, split, write_checkpoint
from mmzero.engines import on_rank0

SYNC, BESIDE, FULL = 'sharded', 'sharded, beside training', 'full'


@dataclass(frozen=True)
class Saving:
    """What one way takes.

    Args:
        ratio (MedianRatio): Time for which it holds the loop, by that of a sharded save that is waited for.
        size (int): Bytes that it leaves.
    """

    ratio: MedianRatio
    size: int


def measure_saving(
    setting: Setting, folder: Path, rounds: int, batch_size: int = 4, seed: int = 0
) -> dict[str, Saving]:
    """Let the ways of saving take turns, with a training step before each. Collective.

    Args:
        setting (Setting): The training that is saved, weights and optimizer.
        folder (Path): Where to write; made, and removed at the end.
        rounds (int): Timed saves of each.
        batch_size (int): Of a micro-batch on a rank. Defaults to 4.
        seed (int): Of the orders and the bootstrap. Defaults to 0.

    Returns:
        dict[str, Saving]: By name.
    """
    source: Any = setting.model()
    batch = source.batch(dist.get_rank(), batch_size)
    model, optim = build_pair(setting)
    run_step(model, optim, lambda: batch)
    background = BackgroundSave()

    def parts() -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, rest = split(dict(state_dict=model.engine.sharded_state()))
        shards, state = optim.shards()
        return {**tensors, **{f'optimizer/{name}': shard for name, shard in shards.items()}}, {
            **rest,
            'optimizer': state,
        }

    def full(_: int) -> None:
        checkpoint = dict(state_dict=model.engine.model_state(), optimizer=optim.state_dict())
        on_rank0(lambda: write_checkpoint(checkpoint, str(folder / 'full.pth')))

    ways: dict[str, Callable[[int], None]] = {
        SYNC: lambda _: save_sharded(*parts(), folder / 'sharded'),
        BESIDE: lambda _: background.start(*parts(), folder / 'beside'),
        FULL: full,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        # One way after the other, so that what is written beside is over before the next one is timed.
        for name in ways:
            run_step(model, optim, lambda: batch)
            seconds[name] += timed_rounds({name: ways[name]}, 1, setting.device, seed + number)[name]
            background.wait()
    dist.barrier()
    sizes = {name: _size(folder / path) for name, path in ((SYNC, 'sharded'), (BESIDE, 'beside'), (FULL, 'full.pth'))}
    dist.barrier()
    on_rank0(lambda: shutil.rmtree(folder))
    return {name: Saving(median_ratio(seconds[name], seconds[SYNC], seed=seed), sizes[name]) for name in ways}


def _size(path: Path) -> int:
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def saving_table(found: dict[str, Saving]) -> str:
    """Lay out what was measured, for docs.

    Args:
        found (dict[str, Saving]): By name.

    Returns:
        str: A Markdown table.
    """
    rows = ['| save | holds the loop, by a sharded save | 95% interval | written, MB |', '|---' * 4 + '|']
    for name, saving in found.items():
        interval = '' if name == SYNC else f'{saving.ratio.low:.3f} to {saving.ratio.high:.3f}'
        rows.append(f'| {name} | {saving.ratio.median:.3f} | {interval} | {saving.size / 1e6:.1f} |')
    return '\n'.join(rows)
