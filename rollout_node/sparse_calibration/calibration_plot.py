"""A plot of acceptance rates by position, one line for each budget. Needs matplotlib, of the extra ``lab``."""

from __future__ import annotations

from pathlib import Path

from p2pcast.inspection import png_figure
from p2pcast.sparse.budget_calibration import Calibration


def plot_percentiles(found: Calibration, target: float, file: Path) -> None:
    """Raises LocalError."""
    figure, ((axis,),) = png_figure.blank(1, 1, width=8, height=5)
    rows = [row for row in found.rows() if row.percentile is not None]
    for pages in found.budgets:
        line = [(row.number * found.bin_tokens, row.percentile) for row in rows if row.pages == pages]
        if line:
            axis.plot(*zip(*line, strict=True), marker="o", label=str(found.constant(pages).budget_tokens(0)))
    axis.axhline(target, color="black", linestyle=":")
    axis.set_xlabel("position, tokens")
    axis.set_ylabel("5th percentile of the acceptance rate")
    axis.legend(title="budget, tokens")
    png_figure.save(figure, file)
