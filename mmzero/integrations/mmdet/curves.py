"""The curves of a run, read from what MMEngine logs."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmzero.errors import DataError

from .figures import new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def read_scalars(work_dir: str | Path) -> tuple[list[dict], list[dict]]:
    """Read what the newest training run below a work dir has logged.

    Args:
        work_dir (str or Path): Work dir of MMEngine's Runner, with LocalVisBackend.

    Returns:
        tuple[list[dict], list[dict]]: Lines of training and lines of validation.

    Raises:
        DataError: If no run has logged a loss.
    """
    # The folders are named by their time; a test run's has no losses.
    for path in sorted(Path(work_dir).glob('*/vis_data/scalars.json'), reverse=True):
        lines = list(_json_lines(path))
        train = [line for line in lines if 'loss' in line]
        if train:
            return train, [line for line in lines if 'loss' not in line]
    raise DataError(
        f'{work_dir}: no training run with losses in */vis_data/scalars.json; train there, with '
        "LocalVisBackend in the visualizer's vis_backends"
    )


def _json_lines(path: Path) -> Iterator[dict]:
    for line in path.read_text(encoding='utf-8').splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return  # a run that was killed leaves half a line at the end


def draw_curves(work_dir: str | Path, out: str | Path) -> None:
    """Draw loss, learning rate, gradient norm and COCO AP of the newest run, 1200 x 800 pixels.

    Args:
        work_dir (str or Path): As :func:`read_scalars`.
        out (str or Path): The PNG to write.

    Raises:
        DataError: If no run has logged a loss.
    """
    from matplotlib.ticker import MaxNLocator

    train, val = read_scalars(work_dir)
    figure = new_figure(12, 8)
    loss, rate, norm, precision = figure.subplots(2, 2).flat
    _draw_series(loss, train, 'loss', 'loss', smooth=True)
    _draw_series(rate, train, 'lr', 'learning rate', smooth=False)
    rate.ticklabel_format(axis='y', style='sci', scilimits=(-2, 3))
    _draw_series(norm, train, 'grad_norm', 'gradient norm', smooth=True)
    _draw_precision(precision, val, 'epoch' if 'epoch' in train[-1] else 'iteration')
    for axes in (loss, rate, norm, precision):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    figure.suptitle(f'Training in {Path(work_dir).resolve().name}')
    save(figure, out)


def _draw_series(axes: 'Axes', lines: list[dict], key: str, label: str, *, smooth: bool) -> None:
    axes.set(xlabel='iteration', ylabel=label)
    points = [(line['step'], line[key]) for line in lines if math.isfinite(line.get(key, math.nan))]
    if not points:
        _say(axes, 'not logged')
        return
    steps, values = zip(*points, strict=True)
    axes.set_ylim(1.15 * min(0, *values), 1.15 * max(0, *values) or 1)
    colour = 'tab:blue'
    if not smooth:
        axes.plot(steps, values, color=colour, marker='.', linewidth=2)
        return
    axes.plot(steps, values, color=colour, marker='.', linewidth=1, alpha=0.4, label='logged')
    axes.plot(steps, _smoothed(values), color=colour, linewidth=2.5, label='smoothed')
    axes.legend()


def _smoothed(values: tuple[float, ...]) -> np.ndarray:
    """Mean over a centred window of a tenth of the values; shorter at both ends."""
    half = max(1, len(values) // 20)
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return np.array([np.mean(window) for window in windows])


def _draw_precision(axes: 'Axes', lines: list[dict], unit: str) -> None:
    axes.set(xlabel=unit, ylabel='COCO AP', ylim=(-0.02, 1.02))
    keys = [key for key in (lines[-1] if lines else {}) if key.endswith(('_mAP', '_mAP_50'))]
    if not keys:
        _say(axes, 'no validation')
        return
    for key in keys:
        steps, values = zip(*((line['step'], line[key]) for line in lines), strict=True)
        name = key.split('/')[-1].replace('_mAP_50', ' AP50').replace('_mAP', ' AP')
        axes.plot(steps, values, marker='o', linewidth=2, label=f'{name}, at last {values[-1]:.3f}')
    axes.margins(x=0.1)
    axes.legend()


def _say(axes: 'Axes', text: str) -> None:
    axes.text(0.5, 0.5, text, ha='center', va='center', transform=axes.transAxes)
