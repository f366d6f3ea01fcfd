"""The report's plots, drawn with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from netem.report.section_text import Picture
from p2pcast.inspection.png_figure import require_matplotlib

INCHES: Final = (8.0, 4.5)
DPI: Final = 110
GROUP: Final = 0.8


def draw(picture: Picture, folder: Path) -> None:
    """Writes ``FILE.png`` into ``folder``. Raises LocalError without matplotlib."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(INCHES, layout="constrained")
    axes = figure.add_subplot()
    (_bars if picture.bars else _lines)(axes, picture)
    axes.set_title(picture.title)
    axes.set_xlabel(picture.x_label)
    axes.set_ylabel(picture.y_label)
    if "y" in picture.log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    if picture.bound is not None:
        axes.axhline(picture.bound[1], color="black", linewidth=0.8, linestyle=":", label=picture.bound[0])
    axes.grid(visible=True, axis="y", alpha=0.3)
    axes.legend(fontsize="small")
    # Omit date and program from the metadata, so the same data gives the same file.
    figure.savefig(folder / f"{picture.file}.png", dpi=DPI, metadata={"Software": None})


def _lines(axes: Any, picture: Picture) -> None:
    for name, points in picture.series.items():
        axes.plot(list(points), list(points.values()), marker="o", label=name)
    if "x" in picture.log:
        axes.set_xscale("log")


def _bars(axes: Any, picture: Picture) -> None:
    places = list(dict.fromkeys(x for points in picture.series.values() for x in points))
    width = GROUP / len(picture.series)
    for at, (name, points) in enumerate(picture.series.items()):
        axes.bar(
            [places.index(x) - GROUP / 2 + (at + 0.5) * width for x in points], list(points.values()), width, label=name
        )
    axes.set_xticks(range(len(places)), places)
