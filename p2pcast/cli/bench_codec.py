"""``p2pcast bench codec``."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import click

from p2pcast.cli.options import console, output, write_document
from p2pcast.errors import UsageError

log = logging.getLogger(__name__)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command("codec")
@click.option("--old", type=_FOLDER, help="Hugging Face folder of the base; with --new, instead of the built-in training steps.")
@click.option("--new", type=_FOLDER, help="Hugging Face folder of the next version.")
@click.option("--codec", type=click.Choice(["auto", "context", "flat", "dense", "raw"]), default="auto", show_default=True)
@click.option(
    "--working-set", type=click.IntRange(1, 65536), default=256, show_default=True, metavar="MIB", help="Old state when timing."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@output
def codec(old: Path | None, new: Path | None, codec: str, working_set: int, as_json: bool, output: Path | None) -> None:
    """Size and speed of the delta codec, beside the entropy, PULSE's format and a bare scan.

    Without --old and --new: pretrained weights under real AdamW steps at 1e-6 and 3e-6.
    """
    if (old is None) != (new is None):
        raise UsageError("give --old and --new together, or neither")
    from p2pcast.bench import codec as bench

    datasets = iter([bench.folder_dataset(old, new)]) if old is not None and new is not None else bench.trained_datasets()
    if old is None:
        log.info("training: pretrained weights, a few AdamW steps a learning rate")
    rows = [bench.measure(dataset, codec, working_set_bytes=working_set << 20) for dataset in datasets]
    document = bench.report(rows, codec)
    write_document(document, output)
    if as_json:
        click.echo(json.dumps(document))
    else:
        _print(document, working_set)


def _print(document: dict[str, Any], working_set: int) -> None:
    from rich.table import Table

    table = Table(title=f"delta codec ({document['codec']})")
    for title in (
        "dataset",
        "changed",
        "bytes",
        "× dense",
        "÷ PULSE",
        "÷ entropy",
        "scan GB/s",
        "encode",
        "÷ scan",
        "decode",
        "÷ scan",
    ):
        table.add_column(title, justify="left" if title == "dataset" else "right", overflow="fold")
    for row in [*document["rows"], {**document, "dataset": "all"}]:
        table.add_row(
            row["dataset"],
            f"{100 * row['changed'] / row['params']:.2f} %" if row["params"] else "–",
            f"{row['bytes']:,}",
            _text(row["dense_bytes"] / row["bytes"] if row["bytes"] else None, 1),
            _text(row["ratio_to_pulse"]),
            _text(row["ratio_to_entropy"]),
            _text(row["scan_gb_s"]),
            _text(row["encode_gb_s"]),
            _text(row["encode_vs_scan"]),
            _text(row["decode_gb_s"]),
            _text(row["decode_vs_scan"]),
        )
    out = console()
    out.print(table)
    out.print(
        f"One core; GB/s of the old state's bytes; words tiled to at least {working_set} MiB. Encode: digests of the old state known, those of the new one "
        "made. Decode: to a patch, both digests verified. PULSE: the smaller of its 2-D and 1-D forms, zstd-1."
    )


def _text(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
