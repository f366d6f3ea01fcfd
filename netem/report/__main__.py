"""``python -m netem.report``: measure what is not measured yet, and write docs/benchmarks.md. What `make bench` calls."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import click

from netem.lab import plots as lab_plots
from netem.lab.run import load
from netem.report.document import FOLDER, Kept, write
from netem.report.measure import kept, measure
from netem.report.plots import draw
from p2pcast.cli.options import PATH
from p2pcast.errors import P2PCastError, UsageError
from p2pcast.store.files import atomic_write, explained

RESULT = "result.json"


def scenarios(folder: Path) -> list[Kept]:
    """What ``p2pcast lab`` has left. Raises LocalError."""
    found = []
    for path in sorted(folder.glob(f"*/{RESULT}")):
        with explained("read", path):
            document = json.loads(path.read_text())
        if document["rows"]:
            found.append(document)
    return found


def plotted(documents: list[Kept], folder: Path) -> dict[str, list[str]]:
    """Their plots, drawn there: names of files by scenario. A user's own scenario has none here."""
    drawn = {}
    for document in documents:
        try:
            scenario = load(document["scenario"])
        except UsageError:
            continue
        drawn[document["scenario"]] = [path.name for path in lab_plots.draw(scenario.plots, document, folder)]
    return drawn


def report(measured: Path, labs: Path, docs: Path) -> Path:
    """Write it; the text's path. Raises LocalError."""
    folder = docs / FOLDER
    with explained("create", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.png"):
            old.unlink()
    documents = scenarios(labs)
    written = write(kept(measured), documents, plotted(documents, folder))
    for picture in written.pictures:
        draw(picture, folder)
    path = docs / "benchmarks.md"
    atomic_write(path, written.text.encode(), None)
    return path


@click.command()
@click.option("--only", multiple=True, metavar="PART", help="Measure this part, also if it has been; repeatable.")
@click.option("--quick", is_flag=True, help="Smaller and fewer: minutes, coarse figures.")
@click.option("--write-only", is_flag=True, help="Measure nothing.")
@click.option("--from", "folder", type=PATH, default=Path("bench-out"), show_default=True, help="Where JSON is kept.")
@click.option("--labs", type=PATH, default=Path("lab-out"), show_default=True, help="Where `p2pcast lab` leaves its own.")
@click.option("--docs", type=PATH, default=Path("docs"), show_default=True, help="Where benchmarks.md goes.")
@click.pass_context
def main(
    context: click.Context, only: tuple[str, ...], quick: bool, write_only: bool, folder: Path, labs: Path, docs: Path
) -> None:
    """Measure what is not measured yet, and write benchmarks.md."""
    logging.basicConfig(level=logging.WARNING)
    try:
        whole = write_only or measure(folder, only, quick=quick, tell=lambda said: click.echo(f"== {said}", err=True))
        click.echo(report(folder, labs, docs))
    except P2PCastError as error:
        click.echo(f"error: {error}", err=True)
        context.exit(error.exit_code)
    except KeyboardInterrupt:
        click.echo("broken off; what has been measured is kept, and `make bench` goes on from there", err=True)
        context.exit(130)
    if not whole:
        context.exit(1)


if __name__ == "__main__":
    main()
