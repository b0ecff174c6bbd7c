"""Figures of matplotlib, which is imported only when one is drawn."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 100


def new_figure(width: float, height: float) -> 'Figure':
    """Make a figure that draws without a display.

    Args:
        width (float): In inches of :data:`DPI` pixels.
        height (float): Likewise.

    Returns:
        Figure: The figure, with a layout that keeps labels apart.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not through pyplot, which keeps figures alive and may look for a display.
    figure = Figure(figsize=(width, height), dpi=DPI, layout='constrained')
    FigureCanvasAgg(figure)
    return figure


def save(figure: 'Figure', out: str | Path) -> None:
    """Write a figure, and the folders above it.

    Args:
        figure (Figure): The figure.
        out (str or Path): The file.
    """
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
