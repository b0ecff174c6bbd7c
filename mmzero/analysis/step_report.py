"""A measured step as a table, as JSON and as a picture."""

import json
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mmzero.analysis.memory import STATES
from mmzero.analysis.step import StepReport

MIB = 2**20
POINTS = 1500
COLORS = dict(
    zip(
        (*STATES, 'activations and other'),
        ('#4477aa', '#ee6677', '#228833', '#ccbb44', '#aa3377', '#bbbbbb'),
        strict=True,
    )
)


def step_table(reports: Sequence[StepReport]) -> str:
    """Lay out what was measured beside what was forecast.

    Args:
        reports (Sequence[StepReport]): Of every rank; the first one's figures are shown, and how far others differ.

    Returns:
        str: The table; sizes in MiB.
    """
    own = reports[0]
    measured, forecast = own.memory.at_peak(), own.forecast
    rows: list[tuple[str, ...]] = [('model states at their peak, MiB on rank 0', 'measured', 'forecast', 'ratio')]
    rows += [(name, _mib(measured[name]), _mib(forecast.memory.get(name, 0)), '') for name in STATES]
    rows.append(('together', _mib(own.bytes), _mib(forecast.bytes), f'{own.memory_ratio:.3f}'))
    rows.append((f'stage formula: {forecast.formula}', '', _mib(forecast.formula_bytes), ''))
    rows.append((f'ZeRO paper, k = 1: {own.paper.formula}', '', _mib(own.paper.bytes), ''))
    rows += [(f'beside it: {name}', _mib(size), '', '') for name, size in measured.items() if name not in STATES]
    rows.append(('the most of all, with activations', _mib(max(own.memory.everything)), '', ''))
    traffic: list[tuple[str, ...]] = [('elements moved per step', 'measured', 'forecast', 'ratio')]
    traffic.append(('together', f'{own.moved:,.0f}', f'{forecast.moved:,.0f}', f'{own.traffic_ratio:.4f}'))
    traffic.append((f'stage formula: {forecast.moved_formula} (N-1)/N', '', f'{forecast.formula_moved:,.0f}', ''))
    traffic.append((f'ZeRO paper, k = 1: {own.paper.moved_formula} (N-1)/N', '', f'{own.paper.moved:,.0f}', ''))
    return '\n'.join([_heading(own), *_aligned(rows, traffic), *_remarks(reports)])


def _heading(report: StepReport) -> str:
    replicate, shard = report.mesh
    batches = 'micro-batch' if report.micro_batches == 1 else 'micro-batches'
    return (
        f'ZeRO stage {report.stage} on {replicate} x {shard} ranks (replicate x shard), k = {report.micro_batches} '
        f'{batches} per step, a = {report.numel:,} parameters'
    )


def _remarks(reports: Sequence[StepReport]) -> list[str]:
    own = reports[0]
    counts = ', '.join(f'{count} {kind}' for kind, count in own.collectives.items()) or 'none'
    ratios = [report.memory_ratio for report in reports]
    return [
        'Measured and forecast parts are those of their own peaks, which may come at different units.',
        f'collectives: {counts}',
        f'copies of weights that autocast made and autograd kept: {_mib(own.weight_copies)} MiB',
        f'memory ratio over all ranks: {min(ratios):.3f} to {max(ratios):.3f}',
    ]


def _aligned(*tables: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for rows in tables for row in rows) for i in range(4)]
    lines = []
    for rows in tables:
        for number, row in enumerate(rows):
            cells = [
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append('  '.join(cells).rstrip())
            if number == 0:
                lines.append('-' * (sum(widths) + 6))
        lines.append('')
    return lines


def _mib(size: float) -> str:
    return f'{size / MIB:,.2f}'


def write_step(reports: Sequence[StepReport], folder: Path) -> list[Path]:
    """Write ``step.json``, with every rank's figures, and ``step.png``.

    Args:
        reports (Sequence[StepReport]): Of every rank.
        folder (Path): Made where it is not there.

    Returns:
        list[Path]: The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    json_file, picture = folder / 'step.json', folder / 'step.png'
    json_file.write_text(json.dumps([report.as_dict() for report in reports], indent=2) + '\n')
    draw_step(reports[0], picture)
    return [json_file, picture]


def draw_step(report: StepReport, path: Path) -> None:
    """Draw memory over the step, by category, with the forecast as a line.

    Args:
        report (StepReport): The measured step.
        path (Path): The PNG.
    """
    series = report.memory.series
    length = len(next(iter(series.values())))
    moments = range(0, length, max(1, length // POINTS))
    names = [name for name in COLORS if name in series]
    figure = Figure(figsize=(10, 5.5), layout='constrained')
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    values = [[series[name][moment] / MIB for moment in moments] for name in names]
    axes.stackplot(list(moments), values, labels=names, colors=[COLORS[name] for name in names], linewidth=0)
    axes.axhline(
        report.forecast.bytes / MIB, color='black', linestyle='--', linewidth=1.2, label='forecast of model states'
    )
    peak = report.memory.states.index(report.bytes)
    axes.axvline(peak, color='black', linestyle=':', linewidth=1, label='their measured peak')
    axes.set_xlabel('allocator events, from the first forward to the end of the last backward')
    axes.set_ylabel('MiB on rank 0')
    axes.set_title(_heading(report), fontsize=10)
    axes.margins(x=0)
    axes.set_ylim(0)
    # From the top down, as the areas lie.
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc='center left', bbox_to_anchor=(1.01, 0.5), frameon=False)
    figure.savefig(path, dpi=120)
