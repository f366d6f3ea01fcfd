"""``p2pcast delta``: diff, apply and squash folders and files, without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from p2pcast.ground.progress_bar import ProgressMeter

if TYPE_CHECKING:
    from p2pcast import offline

_FOLDER = click.Path(path_type=Path)


@click.group()
def delta() -> None:
    """Make, apply and squash delta files, without a network.

    A file made here is signed with a throw-away key. The signature reveals damage; it does not prove who made the file.
    A hub signs its versions with the run's key.

    \b
    Examples:
      p2pcast delta diff step_1 step_2 -o 1-2.p2pd
      p2pcast delta apply step_1 1-2.p2pd -o step_2-copy
      p2pcast delta squash 1-2.p2pd 2-3.p2pd -o 1-3.p2pd
    """


@delta.command("diff")
@click.argument("old", type=_FOLDER)
@click.argument("new", type=_FOLDER)
@click.option("-o", "--output", required=True, type=_FOLDER, help="Path of the new .p2pd file.")
@click.option(
    "--codec",
    type=click.Choice(["auto", "context", "flat", "dense"]),
    default="auto",
    help="Codec of changed cells; auto: the smallest for each cell.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def diff_command(old: Path, new: Path, output: Path, codec: str, as_json: bool) -> None:
    """Write the lossless delta from folder OLD to folder NEW."""
    from p2pcast import offline

    with ProgressMeter("diff") as seen:
        made = offline.diff(old, new, output, codec=codec, progress=seen)
    _report(made, "encode_s", as_json)


@delta.command("apply")
@click.argument("base", type=_FOLDER)
@click.argument("file", type=_FOLDER)
@click.option("-o", "--output", required=True, type=_FOLDER, help="Path of the new folder, which must not exist.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def apply_command(base: Path, file: Path, output: Path, as_json: bool) -> None:
    """Write a copy of folder BASE with the delta in FILE applied. Fails with exit code 3 when BASE is not the delta's
    base.
    """
    from p2pcast import offline

    with ProgressMeter("apply") as seen:
        version = offline.apply_file(base, file, output, progress=seen)
    if as_json:
        click.echo(json.dumps({"path": str(output), "version": str(version)}))
    else:
        click.echo(f"{output}: version {version}")


@delta.command("squash")
@click.argument("files", type=_FOLDER, nargs=-1, required=True)
@click.option("-o", "--output", required=True, type=_FOLDER, help="Path of the new .p2pd file.")
@click.option(
    "--base", type=_FOLDER, help="Folder with the first delta's base; required for deltas in the context codec."
)
@click.option(
    "--codec",
    type=click.Choice(["auto", "context", "flat", "dense"]),
    default="auto",
    help="Codec of the squash; auto: the deltas' codec. Another codec requires --base.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def squash_command(files: tuple[Path, ...], output: Path, base: Path | None, codec: str, as_json: bool) -> None:
    """Join consecutive delta FILES, oldest first, into one delta with the same effect."""
    from p2pcast import offline

    with ProgressMeter("squash") as seen:
        made = offline.squash_files(files, output, base=base, codec=codec, progress=seen)
    _report(made, "squash_s", as_json)


def _report(made: offline.DeltaSummary, seconds_key: str, as_json: bool) -> None:
    ratio = made.dense_bytes / made.nbytes
    if as_json:
        document = {
            "path": str(made.path),
            "base": str(made.base),
            "version": str(made.version),
            "bytes": made.nbytes,
            "dense_bytes": made.dense_bytes,
            "ratio_to_dense": ratio,
            "params": made.params,
            "changed": made.changed,
            "codec": made.codecs,
            "state": f"{made.state:016x}",
            seconds_key: made.seconds,
        }
        click.echo(json.dumps(document))
        return
    cells = ", ".join(f"{count} {name}" for name, count in sorted(made.codecs.items()))
    share = 100 * made.changed / max(made.params, 1)
    click.echo(f"{made.path}: {made.base} → {made.version}, {made.nbytes:,} bytes, {ratio:,.1f} × smaller than dense")
    click.echo(
        f"{made.changed:,} of {made.params:,} values changed ({share:.3f} %); cells: {cells or 'none'}; "
        f"{made.seconds:.2f} s"
    )
    click.echo("Signed with a throw-away key: it reveals damage, and does not prove who made the file.", err=True)
