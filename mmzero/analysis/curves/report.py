"""A comparison as a table, as JSON and as a picture."""

import json
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mmzero.analysis.curves.judge import TAIL, Verdict, end_of
from mmzero.analysis.curves.run import Losses

WINDOW = 15
"""Steps over which drawn curves are smoothed."""
GREYS = ('#777777', '#aaaaaa', '#444444')
COLORS = ('#4477aa', '#ee6677', '#228833', '#aa3377')


def curves_table(found: Sequence[Losses], verdicts: Sequence[Verdict], tail: int = TAIL) -> str:
    """Lay out a comparison.

    Args:
        found (Sequence[Losses]): All trainings.
        verdicts (Sequence[Verdict]): Of the dtypes of 16 bit.
        tail (int): Steps at the end that were compared. Defaults to TAIL.

    Returns:
        str: A Markdown table and a line for each verdict.
    """
    names = sorted(set.intersection(*({*losses.metrics} for losses in found))) if found else []
    names = [name for name in names if name.endswith('bbox_mAP')]
    rows = [' | '.join(['| training', f'loss of the last {tail} steps', 'steps skipped', *names]) + ' |']
    rows.append('|---' * (3 + len(names)) + '|')
    for losses in found:
        metrics = [f'{losses.metrics[name]:.3f}' for name in names]
        rows.append(
            ' | '.join([f'| {losses.curve}', f'{end_of(losses, tail):.4f}', str(losses.skipped), *metrics]) + ' |'
        )
    return '\n'.join([*rows, '', *map(_line, verdicts)])


def _line(verdict: Verdict) -> str:
    where = f'{verdict.end:.4f} beside {verdict.low:.4f} to {verdict.high:.4f}, {verdict.apart:+.1%} of their mean'
    seeds = ', '.join(map(str, verdict.seeds))
    return f'mmzero {verdict.dtype}, seeds {seeds}: {"holds" if verdict.holds else "DOES NOT HOLD"}: {where}'


def write_curves(found: Sequence[Losses], verdicts: Sequence[Verdict], folder: Path) -> list[Path]:
    """Write ``curves.json``, with every loss, and ``curves.png``.

    Args:
        found (Sequence[Losses]): All trainings.
        verdicts (Sequence[Verdict]): Of the dtypes of 16 bit.
        folder (Path): Made where it is not there.

    Returns:
        list[Path]: The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    json_file, picture = folder / 'curves.json', folder / 'curves.png'
    data = dict(
        trainings=[
            dict(
                dtype=losses.curve.dtype,
                seed=losses.curve.seed,
                losses=losses.losses,
                skipped=losses.skipped,
                metrics=losses.metrics,
            )
            for losses in found
        ],
        verdicts=[
            dict(
                dtype=verdict.dtype,
                seeds=verdict.seeds,
                holds=verdict.holds,
                end=verdict.end,
                low=verdict.low,
                high=verdict.high,
                mean=verdict.mean,
            )
            for verdict in verdicts
        ],
    )
    json_file.write_text(json.dumps(data, indent=2) + '\n')
    draw_losses(found, picture)
    return [json_file, picture]


def draw_losses(found: Sequence[Losses], path: Path) -> None:
    """Draw all curves into one picture, smoothed, those of the references in grey.

    Args:
        found (Sequence[Losses]): All trainings.
        path (Path): The PNG.
    """
    figure = Figure(figsize=(9, 5), layout='constrained')
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    greys, colors = iter(GREYS * len(found)), iter(COLORS * len(found))
    for losses in found:
        is_reference = losses.curve.is_reference
        color, style = (next(greys), ':') if is_reference else (next(colors), '-')
        values = _smoothed(losses.losses)
        axes.plot(range(1, len(values) + 1), values, color=color, linestyle=style, label=str(losses.curve))
    axes.set(xlabel='optimizer step', ylabel=f'loss of rank 0, mean of {WINDOW} steps')
    axes.set_xlim(1)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=80)


def _smoothed(values: Sequence[float]) -> list[float]:
    """Mean over each step and those before it, WINDOW at most."""
    windows = [values[max(0, end - WINDOW) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]
