"""``p2pcast quantise``: writes the folder from which a quantised engine starts."""

from __future__ import annotations

import json
from pathlib import Path

import click

from p2pcast.ground.progress_bar import ProgressMeter
from p2pcast.quantised.quantisation_kinds import KINDS

_FOLDER = click.Path(path_type=Path)


@click.command()
@click.argument("folder", type=_FOLDER)
@click.option("-o", "--output", required=True, type=_FOLDER, help="Path of the new folder, which must not exist.")
@click.option("--kind", required=True, type=click.Choice(list(KINDS)), help="Kind of quantised weights.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def quantise(folder: Path, output: Path, kind: str, as_json: bool) -> None:
    """Write the quantised copy of FOLDER, a Hugging Face safetensors folder with weights as trained.

    Its bytes are those that `p2pcast seed --quantise` and `p2pcast join --quantise` compute from the same weights.

    \b
    Example:
      p2pcast quantise Qwen3-4B -o Qwen3-4B-fp8 --kind fp8-channel
    """
    from p2pcast.checkpoint.folder import Checkpoint, write_folder
    from p2pcast.codec.layout import Cell
    from p2pcast.ground.ordered_map import cores
    from p2pcast.offline import state_digest
    from p2pcast.quantised.folder_opening import opening
    from p2pcast.state.shadow import Words

    source = opening(kind)(folder)
    layout, files = source.layout(), source.small_files()
    with ProgressMeter("quantise") as seen:

        def words(cell: Cell) -> Words:
            found = source.words(cell)
            seen(cell.nbytes, layout.nbytes)
            return found

        write_folder(output, layout, words, files, workers=cores())
    state = state_digest(Checkpoint.open(output), layout)
    plain = sum(t.nbytes for file in source.files for t, _ in file.header.tensors)
    if as_json:
        found = {"path": str(output), "kind": kind, "bytes": layout.nbytes, "plain_bytes": plain}
        click.echo(json.dumps({**found, "state": f"{state:016x}"}))
    else:
        click.echo(f"{output}: {kind}, {layout.nbytes:,} bytes ({plain:,} as trained), digest {state:016x}")
