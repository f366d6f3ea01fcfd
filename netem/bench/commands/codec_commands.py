"""Commands of ``p2pcast bench`` about bytes of versions: ``codec``, ``squash``, ``device`` and ``quantised``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import click

from netem.bench.figures_text import NONE, Columns, filled
from netem.bench.rendering import Document, Measurement, command, table
from p2pcast.cli.settings import setting
from p2pcast.codec.codec_prediction import PEER_CORES
from p2pcast.ground.errors import UsageError
from p2pcast.ground.limits import GIB, MIB

if TYPE_CHECKING:
    from rich.table import Table

log = logging.getLogger("p2pcast.bench")
FOLDER: Final = click.Path(exists=True, file_okay=False, path_type=Path)
SPEEDS: Final[Columns] = [
    ("÷ PULSE", "{ratio_to_pulse:.2f}"),
    ("encode GB/s", "{encode_gb_s:.2f}"),
    ("÷ scan", "{encode_vs_scan:.2f}"),
    ("decode GB/s", "{decode_gb_s:.2f}"),
    ("÷ scan", "{decode_vs_scan:.2f}"),
]


@dataclass(frozen=True, slots=True)
class CodecMeasurement(Measurement):
    """Measure size and speed of the delta codec, beside the entropy, other systems' formats and a bare scan; predict
    the times of a large model's versions.

    Without --old and --new, the data are pretrained weights under real AdamW steps at 1e-6 and 3e-6.
    """

    old: Path | None = setting(
        None,
        "Hugging Face folder of the base; with --new, in place of the built-in training steps.",
        type=FOLDER,
    )
    new: Path | None = setting(None, "Hugging Face folder of the next version.", type=FOLDER)
    codec: Literal["auto", "context", "flat", "dense", "raw"] = setting("context", "Codec to measure.")
    working_set: int = setting(256, "Size in MiB of the old state that is coded while timing.", 1, 65536, metavar="MIB")
    trainer_cores: int = setting(PEER_CORES, "Number of cores that encode, for the predicted times.", 1, 4096)
    peer_cores: int = setting(PEER_CORES, "Number of cores that decode, for the predicted times.", 1, 4096)
    memory_gib: int = setting(
        0,
        "Size in GiB of a synthetic state for measuring memory while coding; 0: none. The temporary folder holds the "
        "state twice.",
        0,
        64,
        metavar="GIB",
    )

    def measure(self) -> Document:
        if (self.old is None) != (self.new is None):
            raise UsageError("give --old and --new together, or neither")
        from netem.bench.codec_comparison import comparison, formats
        from netem.bench.codec_comparison.cores import WORKING_SET_BYTES, two_cores
        from netem.bench.codec_comparison.end_to_end import end_to_end
        from netem.bench.codec_comparison.memory import memory

        if self.old is None or self.new is None:
            log.info("training: pretrained weights, a few AdamW steps a learning rate")
            datasets = comparison.trained_datasets()
        else:
            datasets = iter([comparison.folder_dataset(self.old, self.new)])
        size = self.working_set * MIB
        rows, compared, sped_up = [], None, {}
        for dataset in datasets:
            rows.append(comparison.measure(dataset, self.codec, working_set_bytes=size))
            if compared is None:
                sped_up = two_cores(dataset, self.codec, working_set_bytes=min(size, WORKING_SET_BYTES))
                compared = formats.measure_formats(dataset, working_set_bytes=min(size, formats.WORKING_SET_BYTES))
        assert compared is not None
        predicted = end_to_end(compared.formats, encode_cores=self.trainer_cores, decode_cores=self.peer_cores)
        return {
            **comparison.report(rows, self.codec),
            **sped_up,
            "memory": memory(self.memory_gib * GIB, self.codec) if self.memory_gib else None,
            "formats": compared.document,
            "end_to_end": predicted,
        }

    def shown(self, document: Document) -> Iterator[Table | str]:
        columns: Columns = [
            ("dataset", "dataset"),
            ("changed", lambda row: _share(row["changed"], row["params"])),
            ("bytes", "{bytes:,}"),
            ("× dense", lambda row: f"{row['dense_bytes'] / row['bytes']:.1f}" if row["bytes"] else NONE),
            SPEEDS[0],
            ("÷ entropy", "{ratio_to_entropy:.2f}"),
            ("scan GB/s", "{scan_gb_s:.2f}"),
            ("encode", "{encode_gb_s:.2f}"),
            SPEEDS[2],
            ("decode", "{decode_gb_s:.2f}"),
            SPEEDS[4],
        ]
        rows = [*document["rows"], {**document, "dataset": "all"}]
        yield table(rows, columns, f"delta codec ({document['codec']})")
        yield (
            f"One core; GB/s of the old state's bytes; words tiled to at least {self.working_set} MiB. Encode: the old "
            "state's digests are known, the new state's are computed. Decode: to a patch, both digests verified. PULSE:"
            " the smaller of its 2-D and 1-D forms, zstd-1."
        )
        yield filled(
            "Two cores beside one: encode {encode_two_cores:.2f} ×, decode {decode_two_cores:.2f} ×.", document
        )
        if found := document["memory"]:
            yield filled(
                "A synthetic state of {state_bytes:GB .1f} GB on {cores} cores: anonymous memory of "
                "{before_bytes:MB .0f} MB before the first cell, at most {encode_peak_bytes:MB .0f} MB encoding and "
                "{decode_peak_bytes:MB .0f} MB decoding.",
                found,
            )
        formats = document["formats"]
        columns = [("format", "format"), ("× dense", "{times_smaller:.1f}"), *SPEEDS]
        yield table(formats["rows"], columns, f"formats side by side ({formats['dataset']})")
        yield (
            "One core, in turns. Other systems' formats: the bare scan finds the changes, no digest is computed or "
            "verified, and decoding gives positions and values. raw: a copy of the whole state."
        )
        yield from _times(document["end_to_end"], formats["changed_share"])


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else NONE


def _times(document: Document, changed_share: float) -> Iterator[Table | str]:
    """The predicted times: a table for each model."""
    for model in dict.fromkeys(row["model"] for row in document["rows"]):
        formats = [row for row in document["rows"] if row["model"] == model]
        columns = [
            ("Gbit/s", "{gbit_s:g}"),
            *((one["format"] + ("" if one["overlaps"] else " ¹"), f"{{{one['format']}:.3g}}") for one in formats),
            ("chosen", "codec"),
            ("by PULSE's rule", "by_pulse"),
        ]
        rows = [
            choice | {one["format"]: one["seconds"][at] for one in formats}
            for at, choice in enumerate(choice for choice in document["chosen"] if choice["model"] == model)
        ]
        title = (
            f"{model}, {100 * changed_share:.2f} % changed: seconds until a peer has decoded it, "
            f"{document['encode_cores']} cores here and {document['decode_cores']} there"
        )
        yield table(rows, columns, title)
    ways = {"overlapped_gbit_s": "with stages that overlap", "pulse_gbit_s": "by PULSE's equation 26"}
    for cross in document["crossovers"]:
        rates = " and ".join(
            f"{'at any rate' if cross[key] is None else f'below {cross[key]:.3g} Gbit/s'} {how}"
            for key, how in ways.items()
        )
        yield f"{cross['model']}: {cross['small']} before {cross['quick']} {rates}."
    yield "Predicted from the costs above. ¹ Encodes, sends and decodes in sequence, as the format's system does."


@dataclass(frozen=True, slots=True)
class SquashMeasurement(Measurement):
    """Measure the size of k deltas squashed into one, the time of squashing, and the bytes that a ladder of squashes
    saves late peers.

    CHECKPOINTS: a folder with a run's step_N folders. Without CHECKPOINTS, the data are pretrained weights under real
    AdamW steps; training takes some minutes for each learning rate.
    """

    checkpoints: Path | None = setting(None, type=FOLDER, argument=True)
    versions: int = setting(100, "Greatest number of deltas to squash.", 1)
    rates: tuple[float, ...] = setting(
        None,
        "Learning rate of the built-in training, without CHECKPOINTS; repeatable.  [default: 1e-6, 3e-6]",
        above=0,
        flag="lr",
    )
    plot: Path | None = setting(None, "File for a plot of the sizes.", metavar="FILE.png")

    def measure(self) -> Iterator[Document]:
        from netem.bench.codec_comparison import squash_cost
        from p2pcast.inspection.png_figure import require_matplotlib

        if self.plot is not None:
            require_matplotlib()
        if self.checkpoints is None:
            runs = squash_cost.trained_runs(self.rates or squash_cost.LEARNING_RATES)
        else:
            runs = iter([squash_cost.folder_run(self.checkpoints)])
        document: Document = {"versions": self.versions, "rows": []}
        for run in runs:
            log.info("%s: up to %d versions", run.name, self.versions)
            document["rows"].append(squash_cost.measure(run, self.versions))
            yield document
        if self.plot is not None:
            squash_cost.draw(document, self.plot)

    def shown(self, document: Document) -> Iterator[Table | str]:
        columns: Columns = [
            ("k", "{k:d}"),
            ("changed", "{share:.2f} %"),
            ("codec", "codec"),
            ("chain", "{chain_bytes:,}"),
            ("squash", "{squash_bytes:,}"),
            ("÷ chain", "{ratio:.2f}"),
            ("× dense", "{smaller:.1f}"),
            ("squash s", "{squash_s:.3f}"),
            ("÷ replay", "{squash_to_replay:.3f}"),
            ("catch up ÷ replay", "{catch_up_to_replay:.3f}"),
        ]
        ladder: Columns = [
            ("", "ladder"),
            ("bytes, mean", "{mean_bytes:,}"),
            ("÷ chain", "{ratio_to_chain:.2f}"),
            ("furthest ÷ chain", "{furthest_ratio:.2f}"),
            ("artifacts, mean", "{mean_artifacts:.1f}"),
            ("kept ÷ chain", "{kept_to_chain:.2f}"),
        ]
        for run in document["rows"]:
            title = f"{run['dataset']}: {run['params']:,} values, {run['dense_bytes']:,} bytes dense"
            yield table([_mark(run, mark, codec) for mark in run["rows"] for codec in run["sizes"]], columns, title)
            for codec, ladders in run["ladders"].items():
                yield table(ladders, ladder, f"{run['dataset']}, {codec}: peers 1 to {run['versions']} versions behind")
        yield (
            "One core. Replay: each delta decoded, both digests verified, and applied. Catch up: the squash alone. "
            "Exact: a squash made on demand for each peer."
        )


def _mark(run: Mapping[str, Any], mark: Mapping[str, Any], codec: str) -> dict[str, Any]:
    """A line of a table of squashes; a mark without times has none."""
    squash_bytes = mark[codec]["squash_bytes"]
    return {
        **dict.fromkeys(("squash_s", "squash_to_replay", "catch_up_to_replay")), **mark[codec], "k": mark["k"],
        "codec": codec, "share": 100 * mark["changed"] / run["params"],
        "smaller": run["dense_bytes"] / squash_bytes if squash_bytes else None,
    }  # fmt: skip


MEANINGS: Final = {
    "copy": "the state's bytes, read and written",
    "compare": "two states compared; the changed entries copied to the host",
    "digest": "digest of the whole state",
    "ranks": "classes of all words, ranks of the changed words",
    "scatter": "a patch written and read back",
}


@dataclass(frozen=True, slots=True)
class DeviceMeasurement(Measurement):
    """Measure the dense passes of coding and audit with torch operations, on the device that holds the weights."""

    state_bytes: int = setting(256, "Size of the bf16 state in MiB.", 1, name="mib", unit=MIB)
    rounds: int = setting(5, "Number of measured rounds, after one warm-up round.", 1)
    device: str | None = setting(
        None, "torch device, such as cuda:1 or cpu.  [default: the GPU if any, otherwise the CPU]"
    )

    def measure(self) -> Document:
        from netem.bench.codec_comparison.device_speed import bench_device

        return bench_device(self.state_bytes, self.rounds, device=self.device)

    def shown(self, document: Document) -> Iterator[Table | str]:
        columns: Columns = [
            ("pass", "pass"),
            ("what", lambda row: MEANINGS[row["pass"]]),
            ("time", "{s:ms .1f} ms"),
            ("GB of state a second", "{state_bytes_per_s:GB .2f}"),
            ("speed ÷ copy", "{speed_to_copy:.3f}"),
        ]
        share = 100 * document["changed"] / document["params"]
        title = "{device}: {state_bytes:MiB .0f} MiB of bf16, {share:.1f} % changed, median of {rounds}"
        yield table(document["rows"], columns, filled(title, {**document, "share": share}))


@dataclass(frozen=True, slots=True)
class QuantisedMeasurement(Measurement):
    """Measure the bytes of a version in each quantised form beside bf16, and with --engines the KL divergence between
    sampler and learner.

    The data are pretrained weights under real AdamW steps.
    """

    versions: int = setting(3, "Number of deltas for each form.", 1)
    rates: tuple[float, ...] = setting(
        None,
        "Learning rate of the built-in training; repeatable.  [default: 1e-6, 3e-6]",
        above=0,
        flag="lr",
    )
    engines: bool = setting(
        False,
        "Start a vLLM of each kind that runs here, and measure the divergence of its samples from the learner.",
    )

    def measure(self) -> Document:
        from netem.bench import engine_divergence
        from netem.bench.codec_comparison import quantised_sizes

        sizes = [quantised_sizes.measured(rate, self.versions) for rate in self.rates or quantised_sizes.RATES]
        return {"sizes": sizes} | ({"engines": engine_divergence.measured()} if self.engines else {})

    def shown(self, document: Document) -> Iterator[Table | str]:
        for run in document["sizes"]:
            plain = run["rows"][0]["bytes"]
            columns: Columns = [
                ("form", "form"),
                ("whole state", "{dense_bytes:,}"),
                ("delta", "{bytes:,}"),
                ("÷ bf16", "{to_plain:.2f}"),
                ("changed values", "{changed:,}"),
                ("smaller than whole", "{smaller:.0f} ×"),
            ]
            rows = [
                row | {"to_plain": row["bytes"] / plain, "smaller": row["dense_bytes"] / row["bytes"]}
                for row in run["rows"]
            ]
            title = "learning rate {learning_rate:g}, {params:,} values, mean of a version"
            yield table(rows, columns, filled(title, run))
        if "engines" in document:
            columns = [
                ("engine", "engine"),
                ("tokens", "{tokens:,}"),
                ("KL", "{kl:.2e}"),
                ("k3", "{k3:.2e}"),
                ("remark", lambda row: row["error"] or ""),
            ]
            rows = [{"tokens": None, "kl": None, "k3": None, **row} for row in document["engines"]]
            title = "KL(sampler || learner) per token, in nats; learner: transformers, bf16 weights in fp32"
            yield table(rows, columns, title)


codec = command(CodecMeasurement)
squash = command(SquashMeasurement)
device = command(DeviceMeasurement)
quantised = command(QuantisedMeasurement)
