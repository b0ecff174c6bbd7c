"""Running the trainings of a comparison, one after the other, each in processes of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mmengine.config import Config

from mmzero.analysis.curves.config import Curve, curve_config
from mmzero.errors import DataError

DONE = 'done'


@dataclass(frozen=True)
class Losses:
    """What a training logged.

    Args:
        curve (Curve): The training.
        losses (tuple[float, ...]): Rank 0's loss of every step.
        skipped (int): Optimizer steps that were skipped, since gradients were not finite.
        metrics (dict[str, float]): Of the last validation, if there was one.
    """

    curve: Curve
    losses: tuple[float, ...]
    skipped: int
    metrics: dict[str, float]


def train_all(cfg: Config, curves: Sequence[Curve], out: Path, nproc: int) -> list[Losses]:
    """Train one after the other. What the same config has given before is not trained again.

    Args:
        cfg (Config): A config for ZeroRunner; not changed.
        curves (Sequence[Curve]): The trainings.
        out (Path): Each gets a folder here.
        nproc (int): Ranks of each.

    Returns:
        list[Losses]: In the order of the trainings.

    Raises:
        DataError: If one fails.
    """
    return [_train(cfg, curve, out / curve.folder, nproc) for curve in curves]


def _train(cfg: Config, curve: Curve, folder: Path, nproc: int) -> Losses:
    # MMEngine writes the config into the work dir, under the name that it has.
    work_dir = folder / 'run'
    derived = curve_config(cfg, curve, str(work_dir))
    text, config, done = f'{derived.pretty_text}\n# ranks: {nproc}\n', folder / 'config.py', folder / DONE
    if not (done.is_file() and config.is_file() and config.read_text() == text):
        done.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        config.write_text(text)
        started = time.monotonic()
        print(f'{curve}: training', flush=True)
        _launch(config, folder / 'output.txt', nproc)
        print(f'{curve}: {time.monotonic() - started:.0f} s', flush=True)
        done.touch()
    return read_losses(curve, work_dir)


def _launch(config: Path, log: Path, nproc: int) -> None:
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(nproc)]
    command += ['-m', 'mmzero.analysis.curves.rank', str(config)]
    with log.open('w') as file:
        code = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, env=_environment(), check=False
        ).returncode
    if code:
        raise DataError(f'{config}: the training ended with exit code {code}; its output is in {log}')


def _environment() -> dict[str, str]:
    """Ours, with the paths that this process imports from: a rank imports the same mmzero."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {'OMP_NUM_THREADS': '1', **os.environ, 'PYTHONPATH': paths}


def read_losses(curve: Curve, folder: Path) -> Losses:
    """Read what a training logged.

    Args:
        curve (Curve): The training.
        folder (Path): Its work dir.

    Returns:
        Losses: Its losses.

    Raises:
        DataError: If it logged none.
    """
    from mmzero.integrations.mmdet import read_scalars

    train, val = read_scalars(folder)
    return Losses(
        curve,
        tuple(line['loss'] for line in train),
        int(max(line.get('skipped_steps', 0) for line in train)),
        {name: value for name, value in (val[-1] if val else {}).items() if isinstance(value, float)},
    )
