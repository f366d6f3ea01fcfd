"""``p2pcast bench live`` and ``p2pcast bench sparse``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from p2pcast.cli.options import PATH, console, documented, written
from p2pcast.ground.errors import EXIT_FAILED
from p2pcast.rollouts.kv_policy import KV_POLICIES
from p2pcast.sparse.budget_schedule import BudgetSchedule


@click.command()
@click.option("--versions", type=click.IntRange(2), default=50, help="Number of versions trained and published.")
@click.option(
    "--clients", type=click.IntRange(1), default=8, help="Number of clients that stream answers continuously."
)
@click.option("--tp", type=click.IntRange(1), default=2, help="Tensor parallelism of the vLLM server.")
@click.option(
    "--kv",
    type=click.Choice(KV_POLICIES),
    default="recompute",
    help="KV cache after a switch, with p2pcast and with vLLM's own reload; see `p2pcast join --help`.",
)
@click.option("--hidden", type=click.IntRange(128), default=256, help="Hidden size of the model, a multiple of 128.")
@click.option("--layers", type=click.IntRange(1), default=2, help="Number of layers of the model.")
@click.option(
    "--fresh-every",
    type=click.IntRange(1),
    default=1,
    help="Number of versions between comparisons with fresh engines; the first and last version are always compared.",
)
@click.option(
    "--graphs",
    is_flag=True,
    help="vLLM as it starts by default: compiled, with CUDA graphs on a GPU. Otherwise eager, which starts sooner.",
)
@click.option("--dir", "folder", type=PATH, default="bench-out/live", help="Work folder; replaces an earlier one.")
@click.option(
    "--keep",
    is_flag=True,
    help="Checkpoints and state folders kept after a PASS, in addition to logs and the result.",
)
@documented
def live(
    versions: int,
    clients: int,
    tp: int,
    kv: str,
    hidden: int,
    layers: int,
    fresh_every: int,
    graphs: bool,
    folder: Path,
    keep: bool,
    as_json: bool,
    output: Path | None,
) -> None:
    """Install many versions into a live vLLM under load, and measure its pauses and the gaps between tokens, beside
    vLLM's own dense reload in the same run.

    Exit code 1: a request failed, or weights or answers differ from the version's.
    """
    from netem.bench.live_engine import Options, bench_live

    options = Options(folder, versions, clients, tp, kv, hidden, layers, fresh_every, keep, graphs=graphs)
    document = bench_live(options)
    if not written(document, output, as_json=as_json):
        _print(document)
    if document["verdict"] != "PASS":
        sys.exit(EXIT_FAILED)


COLUMNS = {
    "pause_median_s": "pause, median",
    "pause_p99_s": "p99",
    "commands_median_s": "commands, median",
    "gap_p50_s": "gap at a switch, p50",
    "gap_p99_s": "p99",
    "gap_worst_median_s": "worst of a switch, median",
    "gap_elsewhere_p50_s": "gap elsewhere, p50",
    "gap_elsewhere_p99_s": "p99",
}
RATIOS = {
    "pause_median_s": "pause_ratio",
    "commands_median_s": "commands_ratio",
    "gap_p99_s": "gap_p99_ratio",
    "gap_worst_median_s": "gap_worst_ratio",
}


def _print(document: dict[str, Any]) -> None:
    out = console()
    size = f"{document['params']:,} parameters, tensor parallel {document['tensor_parallel']}"
    table = Table("", *COLUMNS.values(), title=f"{size}, {document['clients']} clients, --kv {document['kv']}")
    for row in document["rows"]:
        table.add_row(row["system"], *(_ms(row[key]) for key in COLUMNS))
    table.add_row("ratio", *(_times(document[RATIOS[key]]) if key in RATIOS else "" for key in COLUMNS))
    out.print(table)
    for row in document["rows"]:
        parts = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in row["parts_median_s"].items())
        rate = row["tokens"] / row["elapsed_s"]
        out.print(f"{row['system']}: {row['switches']} switches, {rate:.0f} tokens/s; medians of a switch: {parts}")
    ours = document["rows"][0]
    if ours["recomputed_tokens"] is not None:
        each = ours["recomputed_tokens_median"]
        out.print(
            f"computed anew with the new weights: {ours['recomputed_tokens']:,} tokens in all, {each:.0f} a switch"
        )
    checks = Table("", "check", "", title=document["verdict"])
    for check in document["checks"]:
        checks.add_row("pass" if check["ok"] else "FAIL", check["name"], check["detail"])
    out.print(checks)


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.1f} ms"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} ×"


@click.command()
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the model.  [default: random weights]",
)
@click.option("--layers", type=click.IntRange(3), default=8, help="Layers of the model of random weights.")
@click.option(
    "--length",
    "lengths",
    type=click.IntRange(64),
    multiple=True,
    default=(1000, 4000, 16000),
    help="Tokens of a prompt; may be repeated.",
)
@click.option("--samples", type=click.IntRange(1), default=4, help="Texts in one batch.")
@click.option("--tokens", type=click.IntRange(1), default=64, help="Tokens decoded in each round.")
@click.option("--rounds", type=click.IntRange(1), default=5, help="Measured rounds of each kind.")
@click.option(
    "--pages",
    type=click.IntRange(1),
    default=29,
    help="Pages of 16 tokens that a token attends to, besides the reserved three.",
)
@click.option("--block-size", type=click.IntRange(16), default=32, help="Tokens of a page of the engine's cache.")
@documented
def sparse(
    model: Path | None,
    layers: int,
    lengths: tuple[int, ...],
    samples: int,
    tokens: int,
    rounds: int,
    pages: int,
    block_size: int,
    as_json: bool,
    output: Path | None,
) -> None:
    """Measure decoding with sparse and with dense attention in one vLLM engine, by length of the text.

    Before that, tokens of the engine are compared. Exit code 1: a budget that covers the text is not dense bit for bit,
    or a smaller one disagrees with the learner's own sparse attention by more than rounding. The learner computes in
    float32 on the CPU.
    """
    from netem.bench.sparse_speed import SpeedOptions, bench_sparse

    options = SpeedOptions(
        model=model, layers=layers, lengths=lengths, samples=samples, tokens=tokens, rounds=rounds,
        schedule=BudgetSchedule((pages,)), block_size=block_size,
    )  # fmt: skip
    result = bench_sparse(options)
    if not written(result, output, as_json=as_json):
        title = f"{samples} texts, budget of {options.schedule.budget_tokens(0)} tokens, median of {rounds}"
        _print_sparse(result, title)
    if not (result["agreement"]["exact"] and result["agreement"]["agrees"]):
        sys.exit(EXIT_FAILED)


def _print_sparse(result: dict[str, Any], title: str) -> None:
    table = Table(title=title)
    for column in ("length", "dense, tokens/s", "sparse, tokens/s", "sparse ÷ dense"):
        table.add_column(column, justify="right")
    for row in result["rows"]:
        table.add_row(str(row["length"]), f"{row['dense']:.0f}", f"{row['sparse']:.0f}", f"{row['ratio']:.2f}")
    console().print(table)
    found = result["agreement"]
    full = "equals dense attention bit for bit" if found["exact"] else "DIFFERS from dense attention"
    small = "agrees" if found["agrees"] else "DISAGREES"
    console().print(
        f"A budget that covers the text {full}. The smaller one {small} with the learner's sparse attention: mean gap"
        f" of a log-probability {found['sparse_gap']:.1e} nats (dense {found['dense_gap']:.1e}), effect of the missing"
        f" pages {found['effect']:.1e}. {found['shortened']} of {found['tokens']} tokens attended to fewer pages."
    )
