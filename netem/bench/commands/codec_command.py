"""``p2pcast bench codec``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click

from p2pcast.cli.options import console, documented, written
from p2pcast.codec.codec_prediction import PEER_CORES
from p2pcast.ground.errors import UsageError

log = logging.getLogger("p2pcast.bench")
_CORES = click.IntRange(1, 4096)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command("codec")
@click.option(
    "--old", type=_FOLDER, help="Hugging Face folder of the base; with --new, in place of the built-in training steps."
)
@click.option("--new", type=_FOLDER, help="Hugging Face folder of the next version.")
@click.option(
    "--codec",
    type=click.Choice(["auto", "context", "flat", "dense", "raw"]),
    default="context",
    help="Codec to measure.",
)
@click.option(
    "--working-set",
    type=click.IntRange(1, 65536),
    default=256,
    metavar="MIB",
    help="Size in MiB of the old state that is coded while timing.",
)
@click.option(
    "--trainer-cores", type=_CORES, default=PEER_CORES, help="Number of cores that encode, for the predicted times."
)
@click.option(
    "--peer-cores", type=_CORES, default=PEER_CORES, help="Number of cores that decode, for the predicted times."
)
@click.option(
    "--memory-gib",
    type=click.IntRange(0, 64),
    default=0,
    metavar="GIB",
    help=(
        "Size in GiB of a synthetic state for measuring memory while coding; 0: none. The temporary folder holds the "
        "state twice."
    ),
)
@documented
def codec(
    old: Path | None,
    new: Path | None,
    codec: str,
    working_set: int,
    trainer_cores: int,
    peer_cores: int,
    memory_gib: int,
    as_json: bool,
    output: Path | None,
) -> None:
    """Measure size and speed of the delta codec, beside the entropy, other systems' formats and a bare scan; predict
    the times of a large model's versions.

    Without --old and --new, the data are pretrained weights under real AdamW steps at 1e-6 and 3e-6.
    """
    if (old is None) != (new is None):
        raise UsageError("give --old and --new together, or neither")
    from netem.bench.codec_comparison import comparison as bench
    from netem.bench.codec_comparison import formats
    from netem.bench.codec_comparison.cores import WORKING_SET_BYTES, two_cores
    from netem.bench.codec_comparison.end_to_end import end_to_end
    from netem.bench.codec_comparison.memory import GIB, memory

    datasets = (
        iter([bench.folder_dataset(old, new)]) if old is not None and new is not None else bench.trained_datasets()
    )
    if old is None:
        log.info("training: pretrained weights, a few AdamW steps a learning rate")
    rows, compared, sped_up = [], None, {}
    for dataset in datasets:
        rows.append(bench.measure(dataset, codec, working_set_bytes=working_set << 20))
        if compared is None:
            sped_up = two_cores(dataset, codec, working_set_bytes=min(working_set << 20, WORKING_SET_BYTES))
            compared = formats.measure_formats(
                dataset, working_set_bytes=min(working_set << 20, formats.WORKING_SET_BYTES)
            )
    assert compared is not None
    document = {
        **bench.report(rows, codec),
        **sped_up,
        "memory": memory(memory_gib * GIB, codec) if memory_gib else None,
        "formats": compared.document,
        "end_to_end": end_to_end(compared.formats, encode_cores=trainer_cores, decode_cores=peer_cores),
    }
    if not written(document, output, as_json=as_json):
        _print(document, working_set)
        _print_formats(document["formats"])
        _print_times(document["end_to_end"], document["formats"]["changed_share"])


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
        f"One core; GB/s of the old state's bytes; words tiled to at least {working_set} MiB. "
        "Encode: the old state's digests are known, the new state's are computed. "
        "Decode: to a patch, both digests verified. PULSE: the smaller of its 2-D and 1-D forms, zstd-1."
    )
    out.print(
        f"Two cores beside one: encode {_text(document['encode_two_cores'])} ×, "
        f"decode {_text(document['decode_two_cores'])} ×."
    )
    if found := document["memory"]:
        out.print(
            f"A synthetic state of {found['state_bytes'] / 1e9:.1f} GB on {found['cores']} cores: "
            f"anonymous memory of {found['before_bytes'] / 1e6:.0f} MB before the first cell, "
            f"at most {found['encode_peak_bytes'] / 1e6:.0f} MB encoding and "
            f"{found['decode_peak_bytes'] / 1e6:.0f} MB decoding."
        )


def _print_formats(document: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title=f"formats side by side ({document['dataset']})")
    table.add_column("format")
    for title in ("× dense", "÷ PULSE", "encode GB/s", "÷ scan", "decode GB/s", "÷ scan"):
        table.add_column(title, justify="right")
    for row in document["rows"]:
        table.add_row(
            row["format"],
            _text(row["times_smaller"], 1),
            _text(row["ratio_to_pulse"]),
            _text(row["encode_gb_s"]),
            _text(row["encode_vs_scan"]),
            _text(row["decode_gb_s"]),
            _text(row["decode_vs_scan"]),
        )
    out = console()
    out.print(table)
    out.print(
        "One core, in turns. Other systems' formats: the bare scan finds the changes, no digest is computed or "
        "verified, "
        "and decoding gives positions and values. raw: a copy of the whole state."
    )


def _print_times(document: dict[str, Any], changed_share: float) -> None:
    from rich.table import Table

    out = console()
    for model in dict.fromkeys(row["model"] for row in document["rows"]):
        rows = [row for row in document["rows"] if row["model"] == model]
        table = Table(
            title=f"{model}, {100 * changed_share:.2f} % changed: seconds until a peer has decoded it, "
            f"{document['encode_cores']} cores here and {document['decode_cores']} there"
        )
        table.add_column("Gbit/s", justify="right")
        for row in rows:
            table.add_column(row["format"] + ("" if row["overlaps"] else " ¹"), justify="right")
        table.add_column("chosen")
        table.add_column("by PULSE's rule")
        chosen = [c for c in document["chosen"] if c["model"] == model]
        for at, choice in enumerate(chosen):
            table.add_row(
                f"{choice['gbit_s']:g}",
                *(f"{row['seconds'][at]:.3g}" for row in rows),
                choice["codec"],
                choice["by_pulse"],
            )
        out.print(table)
    for cross in document["crossovers"]:
        rates = " and ".join(
            f"{'at any rate' if cross[key] is None else f'below {cross[key]:.3g} Gbit/s'} {how}"
            for key, how in (
                ("overlapped_gbit_s", "with stages that overlap"),
                ("pulse_gbit_s", "by PULSE's equation 26"),
            )
        )
        out.print(f"{cross['model']}: {cross['small']} before {cross['quick']} {rates}.")
    out.print("Predicted from the costs above. ¹ Encodes, sends and decodes in sequence, as the format's system does.")


def _text(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
