"""A scenario's plots, drawn with matplotlib: measured rows as lines or bars, with the paper's figures beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, Final

from netem.lab.requirements import matches
from netem.lab.scenario import Plot
from netem.lab.scenario_report import text
from p2pcast.inspection.png_figure import require_matplotlib

DPI: Final = 120
INCHES: Final = (8.0, 4.8)
GROUP: Final = 0.8
"""Share of the space between two groups that the bars fill."""

Row = Mapping[str, Any]
Series = Mapping[str, Mapping[Any, float]]
"""Name → x → y; y is the mean of rows with the same x."""


def draw(plots: Sequence[Plot], document: Mapping[str, Any], folder: Path) -> list[Path]:
    """A PNG for each plot that has rows. Raises LocalError without matplotlib."""
    drawn = []
    for plot in plots:
        ours, theirs = series(plot, document["rows"]), series(plot, document["reference"], paper=True)
        if not ours:
            continue
        path = folder / f"{document['scenario']}-{plot.file}.png"
        x_label = plot.x_label or document["columns"].get(plot.x, plot.x)
        y_label = plot.y_label or document["columns"].get(plot.y, plot.y)
        paint(
            path, plot.title, x_label, y_label, _ordered(ours), _ordered(theirs), bars=plot.kind == "bar",
            log=plot.log, legend=len(ours) + len(theirs) > 1 or bool(plot.series),
        )  # fmt: skip
        drawn.append(path)
    return drawn


def paint(
    path: Path,
    title: str,
    x_label: str,
    y_label: str,
    ours: Series,
    theirs: Series = MappingProxyType({}),
    *,
    bars: bool = False,
    log: str = "",
    legend: bool = True,
    bound: tuple[str, float] | None = None,
) -> None:
    """Write one figure: ``ours`` and ``theirs`` as lines, or as groups of bars in the order of their x. ``bound``: a
    named horizontal line. Equal data give equal bytes. Raises LocalError without matplotlib.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(INCHES, layout="constrained")
    axes = figure.add_subplot()
    if bars:
        _bars(axes, ours, theirs)
    else:
        _lines(axes, ours, theirs)
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if "x" in log:
        axes.set_xscale("log")
    if "y" in log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    if bound is not None:
        axes.axhline(bound[1], color="black", linewidth=0.8, linestyle=":", label=bound[0])
    if legend:
        axes.legend(fontsize="small")
    axes.grid(visible=True, axis="y", alpha=0.3)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})


def series(plot: Plot, rows: Sequence[Row], *, paper: bool = False) -> Series:
    """The series of a plot in row order; rows without its keys are left out."""
    found: dict[str, dict[Any, list[float]]] = {}
    for row in rows:
        x, y = row.get(plot.x), row.get(plot.y)
        # A paper row may lack keys that only distinguish p2pcast's own rows.
        where = {key: values for key, values in plot.where.items() if not paper or key in row}
        if x is None or not isinstance(y, int | float) or not matches(row, where):
            continue
        names = [text(row[key]) for key in plot.series if row.get(key) is not None]
        name = ", ".join([*names, *([row["source"]] if paper else [])])
        found.setdefault(name or "measured", {}).setdefault(x, []).append(float(y))
    return {name: {x: fmean(ys) for x, ys in points.items()} for name, points in found.items()}


def _ordered(found: Series) -> Series:
    """Numbers by size."""
    return {
        name: dict(sorted(points.items())) if all(isinstance(x, int | float) for x in points) else points
        for name, points in found.items()
    }


def _lines(axes: Any, ours: Series, theirs: Series) -> None:
    for shown, style in ((ours, {"marker": "o"}), (theirs, {"marker": "x", "linestyle": "--", "alpha": 0.7})):
        for name, points in shown.items():
            axes.plot(list(points), list(points.values()), label=name, **style)


def _bars(axes: Any, ours: Series, theirs: Series) -> None:
    places = list(dict.fromkeys(x for shown in (ours, theirs) for points in shown.values() for x in points))
    if all(isinstance(x, int | float) for x in places):
        places.sort()
    width = GROUP / (len(ours) + len(theirs))
    for at, (name, points) in enumerate([*ours.items(), *theirs.items()]):
        where = [places.index(x) - GROUP / 2 + (at + 0.5) * width for x in points]
        paper = {"hatch": "//", "alpha": 0.6} if at >= len(ours) else {}
        axes.bar(where, list(points.values()), width, label=name, **paper)
    axes.set_xticks(range(len(places)), list(map(text, places)))
