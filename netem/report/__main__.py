"""``python -m netem.report``: measures all parts without a result, and writes docs/benchmarks.md. Called by `make
bench`.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import click

from netem.lab import scenario_plots as lab_plots
from netem.lab.scenario_run import load
from netem.report.document import FOLDER, Kept, write
from netem.report.parts import kept, measure
from netem.report.section_text import Picture
from p2pcast.cli.options import PATH
from p2pcast.files.atomic_files import atomic_write, explained
from p2pcast.ground.errors import P2PCastError, UsageError

RESULT = "result.json"


def scenarios(folder: Path) -> list[Kept]:
    """The scenario documents that ``p2pcast lab`` has written. Raises LocalError."""
    found = []
    for path in sorted(folder.glob(f"*/{RESULT}")):
        with explained("read", path):
            document = json.loads(path.read_text())
        if document["rows"]:
            found.append(document)
    return found


def plotted(documents: list[Kept], folder: Path) -> dict[str, list[str]]:
    """Draws the scenarios' plots into ``folder``; returns file names by scenario. User scenarios have no plots in the
    report.
    """
    drawn = {}
    for document in documents:
        try:
            scenario = load(document["scenario"])
        except UsageError:
            continue
        drawn[document["scenario"]] = [path.name for path in lab_plots.draw(scenario.plots, document, folder)]
    return drawn


def report(measured: Path, labs: Path, docs: Path) -> Path:
    """Writes benchmarks.md with its plots and data; returns its path. Raises LocalError."""
    folder = docs / FOLDER
    with explained("create", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("*.png"), *folder.glob("*.csv")):
            old.unlink()
    documents = scenarios(labs)
    written = write(kept(measured), documents, plotted(documents, folder))
    for picture in written.pictures:
        _draw(picture, folder)
    for name, text in written.data.items():
        atomic_write(folder / name, text.encode(), None)
    path = docs / "benchmarks.md"
    atomic_write(path, written.text.encode(), None)
    return path


def _draw(picture: Picture, folder: Path) -> None:
    """Raises LocalError without matplotlib."""
    lab_plots.paint(
        folder / f"{picture.file}.png", picture.title, picture.x_label, picture.y_label, picture.series,
        bars=picture.bars, log=picture.log, bound=picture.bound,
    )  # fmt: skip


@click.command()
@click.option(
    "--only", multiple=True, metavar="PART", help="Part to measure again, even if it has a result; repeatable."
)
@click.option(
    "--quick", is_flag=True, help="Smaller and fewer measurements: minutes instead of half an hour, coarse figures."
)
@click.option("--write-only", is_flag=True, help="Measure nothing.")
@click.option(
    "--from",
    "folder",
    type=PATH,
    default=Path("bench-out"),
    show_default=True,
    help="Folder for the JSON results of the parts.",
)
@click.option(
    "--labs",
    type=PATH,
    default=Path("lab-out"),
    show_default=True,
    help="Folder of the scenario documents of `p2pcast lab`.",
)
@click.option("--docs", type=PATH, default=Path("docs"), show_default=True, help="Folder for benchmarks.md.")
@click.pass_context
def main(
    context: click.Context, only: tuple[str, ...], quick: bool, write_only: bool, folder: Path, labs: Path, docs: Path
) -> None:
    """Measure all parts without a result, and write benchmarks.md."""
    logging.basicConfig(level=logging.WARNING)
    try:
        whole = write_only or measure(folder, only, quick=quick, show=lambda said: click.echo(f"== {said}", err=True))
        click.echo(report(folder, labs, docs))
    except P2PCastError as error:
        click.echo(f"error: {error}", err=True)
        context.exit(error.exit_code)
    except KeyboardInterrupt:
        click.echo("interrupted; finished measurements are kept, and `make bench` continues with the others", err=True)
        context.exit(130)
    if not whole:
        context.exit(1)


if __name__ == "__main__":
    main()
