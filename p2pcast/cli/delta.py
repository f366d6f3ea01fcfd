"""``p2pcast delta``: diff, apply and squash between folders and files, without a network."""

from __future__ import annotations

import json
from pathlib import Path

import click

from p2pcast import offline
from p2pcast.progress import Meter

_FOLDER = click.Path(path_type=Path)


@click.group()
def delta() -> None:
    """Make, apply and join deltas as files, without a network.

    Files made here are signed with a throw-away key: any damage is noticed, but who made a file is not proved. For that, versions come from a hub,
    signed with the run's key.
    """


@delta.command("diff")
@click.argument("old", type=_FOLDER)
@click.argument("new", type=_FOLDER)
@click.option("-o", "--output", required=True, type=_FOLDER, help="The .p2pd file to write.")
@click.option(
    "--codec",
    type=click.Choice(["auto", "context", "flat", "dense"]),
    default="auto",
    show_default=True,
    help="Codec of changed cells; auto: the smallest for each.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def diff_command(old: Path, new: Path, output: Path, codec: str, as_json: bool) -> None:
    """Write the lossless delta from folder OLD to folder NEW."""
    with Meter("diff") as seen:
        made = offline.diff(old, new, output, codec=codec, seen=seen)
    _report(made, "encode_s", as_json)


@delta.command("apply")
@click.argument("base", type=_FOLDER)
@click.argument("file", type=_FOLDER)
@click.option("-o", "--output", required=True, type=_FOLDER, help="The folder to write; it may not exist yet.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def apply_command(base: Path, file: Path, output: Path, as_json: bool) -> None:
    """Write folder BASE with the delta in FILE applied. A wrong BASE is refused."""
    with Meter("apply") as seen:
        version = offline.apply_file(base, file, output, seen=seen)
    if as_json:
        click.echo(json.dumps({"path": str(output), "version": str(version)}))
    else:
        click.echo(f"{output}: version {version}")


@delta.command("squash")
@click.argument("files", type=_FOLDER, nargs=-1, required=True)
@click.option("-o", "--output", required=True, type=_FOLDER, help="The .p2pd file to write.")
@click.option("--base", type=_FOLDER, help="The folder that the first delta starts from; needed for deltas coded in context.")
@click.option(
    "--codec",
    type=click.Choice(["auto", "context", "flat", "dense"]),
    default="auto",
    show_default=True,
    help="How the result is coded; auto: as the deltas are. Others need --base.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def squash_command(files: tuple[Path, ...], output: Path, base: Path | None, codec: str, as_json: bool) -> None:
    """Join consecutive deltas, oldest first, into one that does the same."""
    with Meter("squash") as seen:
        made = offline.squash_files(files, output, base=base, codec=codec, seen=seen)
    _report(made, "squash_s", as_json)


def _report(made: offline.Written, seconds_key: str, as_json: bool) -> None:
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
        f"{made.changed:,} of {made.params:,} values changed ({share:.3f} %); cells: {cells or 'none'}; {made.seconds:.2f} s"
    )
    click.echo("Signed with a throw-away key: damage is noticed, the maker is not proved.", err=True)
