"""Commands of ``p2pcast bench`` with a real vLLM: ``live`` and ``sparse``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from netem.bench.figures_text import NONE, Columns, filled, value_of
from netem.bench.rendering import Document, Measurement, command, table
from p2pcast.cli.options import PATH
from p2pcast.cli.settings import setting
from p2pcast.rollouts.kv_policy import KV_POLICIES
from p2pcast.sparse.budget_schedule import BudgetSchedule

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS: Final = {
    "pause_median_s": "pause, median",
    "pause_p99_s": "p99",
    "commands_median_s": "commands, median",
    "gap_p50_s": "gap at a switch, p50",
    "gap_p99_s": "p99",
    "gap_worst_median_s": "worst of a switch, median",
    "gap_elsewhere_p50_s": "gap elsewhere, p50",
    "gap_elsewhere_p99_s": "p99",
}
RATIOS: Final = {
    "pause_median_s": "pause_ratio",
    "commands_median_s": "commands_ratio",
    "gap_p99_s": "gap_p99_ratio",
    "gap_worst_median_s": "gap_worst_ratio",
}


@dataclass(frozen=True, slots=True)
class LiveMeasurement(Measurement):
    """Install many versions into a live vLLM under load, and measure its pauses and the gaps between tokens, beside
    vLLM's own dense reload in the same run.

    Exit code 1: a request failed, or weights or answers differ from the version's.
    """

    versions: int = setting(50, "Number of versions trained and published.", 2)
    clients: int = setting(8, "Number of clients that stream answers continuously.", 1)
    tensor_parallel: int = setting(2, "Tensor parallelism of the vLLM server.", 1, name="tp")
    kv: str = setting(
        "recompute",
        "KV cache after a switch, with p2pcast and with vLLM's own reload; see `p2pcast join --help`.",
        choices=KV_POLICIES,
    )
    hidden: int = setting(256, "Hidden size of the model, a multiple of 128.", 128)
    layers: int = setting(2, "Number of layers of the model.", 1)
    fresh_every: int = setting(
        1,
        "Number of versions between comparisons with fresh engines; the first and last version are always compared.",
        1,
    )
    graphs: bool = setting(
        False,
        "vLLM as it starts by default: compiled, with CUDA graphs on a GPU. Otherwise eager, which starts sooner.",
    )
    folder: Path = setting("bench-out/live", "Work folder; replaces an earlier one.", type=PATH, flag="dir")
    keep: bool = setting(False, "Checkpoints and state folders kept after a PASS, in addition to logs and the result.")

    def measure(self) -> Document:
        from netem.bench.live_engine import LiveEngineOptions, bench_live

        return bench_live(
            LiveEngineOptions(
                self.folder, self.versions, self.clients, self.tensor_parallel, self.kv, self.hidden, self.layers,
                self.fresh_every, self.keep, graphs=self.graphs,
            )
        )  # fmt: skip

    def shown(self, document: Document) -> Iterator[Table | str]:
        columns: Columns = [("", "system"), *((head, f"{{{key}:ms .1f}} ms") for key, head in COLUMNS.items())]
        title = "{params:,} parameters, tensor parallel {tensor_parallel}, {clients} clients, --kv {kv}"
        shown = table(document["rows"], columns, filled(title, document))
        ratios = (value_of(document, f"{{{RATIOS[key]}:.1f}} ×") if key in RATIOS else "" for key in COLUMNS)
        shown.add_row("ratio", *map(str, ratios))
        yield shown
        for row in document["rows"]:
            parts = ", ".join(
                f"{name} {NONE if seconds is None else f'{1e3 * seconds:.1f} ms'}"
                for name, seconds in row["parts_median_s"].items()
            )
            rate = row["tokens"] / row["elapsed_s"]
            yield f"{row['system']}: {row['switches']} switches, {rate:.0f} tokens/s; medians of a switch: {parts}"
        if document["rows"][0]["recomputed_tokens"] is not None:
            yield filled(
                "computed anew with the new weights: {recomputed_tokens:,} tokens in all, "
                "{recomputed_tokens_median:.0f} a switch",
                document["rows"][0],
            )
        checks: Columns = [("", lambda row: "pass" if row["ok"] else "FAIL"), ("check", "name"), ("", "detail")]
        yield table(document["checks"], checks, document["verdict"])

    def failed(self, document: Document) -> bool:
        return bool(document["verdict"] != "PASS")


@dataclass(frozen=True, slots=True)
class SparseMeasurement(Measurement):
    """Measure decoding with sparse and with dense attention in one vLLM engine, by length of the text.

    Before that, tokens of the engine are compared. Exit code 1: a budget that covers the text is not dense bit for bit,
    or a smaller one disagrees with the learner's own sparse attention by more than rounding. The learner computes in
    float32 on the CPU.
    """

    model: Path | None = setting(
        None,
        "Folder of the model.  [default: random weights]",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
    )
    layers: int = setting(8, "Layers of the model of random weights.", 3)
    lengths: tuple[int, ...] = setting((1000, 4000, 16000), "Tokens of a prompt; may be repeated.", 64, flag="length")
    samples: int = setting(4, "Texts in one batch.", 1)
    tokens: int = setting(64, "Tokens decoded in each round.", 1)
    rounds: int = setting(5, "Measured rounds of each kind.", 1)
    pages: int = setting(29, "Pages of 16 tokens that a token attends to, besides the reserved three.", 1)
    block_size: int = setting(32, "Tokens of a page of the engine's cache.", 16)

    def measure(self) -> Document:
        from netem.bench.sparse_speed import SpeedOptions, bench_sparse

        return bench_sparse(
            SpeedOptions(
                model=self.model, layers=self.layers, lengths=self.lengths, samples=self.samples, tokens=self.tokens,
                rounds=self.rounds, schedule=BudgetSchedule((self.pages,)), block_size=self.block_size,
            )
        )  # fmt: skip

    def shown(self, document: Document) -> Iterator[Table | str]:
        columns: Columns = [
            ("length", "{length:d}"),
            ("dense, tokens/s", "{dense:.0f}"),
            ("sparse, tokens/s", "{sparse:.0f}"),
            ("sparse ÷ dense", "{ratio:.2f}"),
        ]
        budget = BudgetSchedule((self.pages,)).budget_tokens(0)
        title = f"{self.samples} texts, budget of {budget} tokens, median of {self.rounds}"
        yield table(document["rows"], columns, title)
        found = document["agreement"]
        full = "equals dense attention bit for bit" if found["exact"] else "DIFFERS from dense attention"
        small = "agrees" if found["agrees"] else "DISAGREES"
        yield filled(
            "A budget that covers the text {full}. The smaller one {small} with the learner's sparse attention: mean "
            "gap of a log-probability {sparse_gap:.1e} nats (dense {dense_gap:.1e}), effect of the missing pages "
            "{effect:.1e}. {shortened} of {tokens} tokens attended to fewer pages.",
            {**found, "full": full, "small": small},
        )

    def failed(self, document: Document) -> bool:
        return not (document["agreement"]["exact"] and document["agreement"]["agrees"])


live = command(LiveMeasurement)
sparse = command(SparseMeasurement)
