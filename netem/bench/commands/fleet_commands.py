"""Commands of ``p2pcast bench`` that measure hubs and peers as processes on this machine: ``relay``, ``catchup``,
``heal``, ``anchors``, ``simulated`` and ``broadcast``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import click

from netem.bench.figures_text import Columns, filled
from netem.bench.rendering import Document, Measurement, command, table
from p2pcast.cli.options import PATH, RateParameter
from p2pcast.cli.settings import setting
from p2pcast.ground.errors import UsageError
from p2pcast.ground.limits import MIB
from p2pcast.process import event_loop

if TYPE_CHECKING:
    from rich.table import Table

CROWDED: Final = 0.95
"""Share of the machine's cores in use above which the machine limits the times, and not the links."""
RIVALS: Final = ("chain", "libtorrent", "shardcast", "star", "rsync", "zstd")

RELAY: Final[Columns] = [
    ("run", "run"),
    ("link", "link"),
    ("CPU s/GB", "{cpu_s_per_gb:.2f}"),
    ("of it kernel", "{kernel_s_per_gb:.2f}"),
    ("GB/s", "{gb_s:.2f}"),
    ("peak anonymous memory", "{peak_rss_bytes:MiB .0f} MiB"),
]
WIDE: Final[Columns] = [
    ("cores", "cores"),
    ("GB/s", "{gb_s:.3f}"),
    ("CPU s/GB", "{cpu_s_per_gb:.2f}"),
    ("of it the event loop's thread", "{loop_s_per_gb:.2f}"),
    ("most that the loop can carry, GB/s", "{loop_gb_s:.2f}"),
]


@dataclass(frozen=True, slots=True)
class RelayMeasurement(Measurement):
    """Measure CPU time per GB and memory of a peer that receives, verifies, stores and forwards; staging is off."""

    payload: int = setting(256, "Size in MiB of the data sent through the chain.", 4)
    rate: float = setting("1gbit", "Rate of the source in bits per second.", type=RateParameter())
    stripes: int = setting(4, "Number of TCP connections of a link.", 1, 64)
    runs: int = setting(3, "Number of measured runs.", 1)
    wide: bool = setting(False, "Throughput of the peer by its number of cores instead; without --rate.")

    def measure(self) -> Document:
        from netem.bench.relay_cost import bench_relay, bench_wide

        if not self.wide:
            return bench_relay(self.payload * MIB, self.rate, self.stripes, self.runs)
        if click.get_current_context().get_parameter_source("rate") is not click.core.ParameterSource.DEFAULT:
            raise UsageError("--wide measures without a limit of the source: leave --rate out")
        return bench_wide(self.payload * MIB, self.stripes, self.runs)

    def shown(self, document: Document) -> Iterator[Table | str]:
        title = f"{self.payload} MiB over {self.stripes} stripes"
        if self.wide:
            yield table(document["rows"], WIDE, f"{title} behind TLS")
            return
        yield table(document["rows"], RELAY, f"{title}, middle of three processes")
        yield filled(
            "median CPU, s/GB: plaintext {cpu_s_per_gb_plaintext:.2f} ({plaintext_to_bare:.2f} x the "
            "{cpu_s_per_gb_bare:.2f} of a bare relay: read, hash, send, write), TLS {cpu_s_per_gb_tls:.2f} "
            "({tls_to_bare:.2f} x the bare relay's {cpu_s_per_gb_bare_tls:.2f}); peak {peak_rss_bytes:MiB .0f} MiB",
            document,
        )


@dataclass(frozen=True, slots=True)
class CatchupMeasurement(Measurement):
    """Measure bytes and time until a peer that missed many versions is current. It catches up by every delta, by the
    squashes that the hub keeps, and by a squash made for this peer.

    For comparison: one squash of all versions, made offline, the smallest possible. A hub and peers run as processes on
    this machine; no privileges needed.
    """

    versions: int = setting(40, "Number of versions that the peer is behind.", 2)
    state_bytes: int = setting(64, "Size of the weights in MiB.", 1, name="state_mib", flag="state", unit=MIB)
    rate: float = setting("20mbit", "Rate of the peer's link in bits per second.", type=RateParameter())
    codec: Literal["flat", "context"] = setting("context", "Codec of the deltas.")
    deadline: float = setting(120.0, "Time limit in seconds for each way to catch up.", 1)

    def measure(self) -> Document:
        from netem.bench.catchup_cost import catch_up

        with tempfile.TemporaryDirectory(prefix="p2pcast-bench-", dir="/dev/shm") as folder:
            found = event_loop.run(
                catch_up(Path(folder), self.state_bytes, self.versions, self.rate / 8, self.codec, self.deadline)
            )
        return {
            "versions": self.versions, "codec": self.codec, "rate_bits_s": self.rate, "state_bytes": found.state_bytes,
            "chain_bytes": found.chain_bytes, "exact_bytes": found.exact_bytes,
            "rows": [
                {
                    "way": r.policy, "artifacts": r.artifacts, "bytes": r.bytes, "seconds": round(r.seconds, 3),
                    "to_chain": round(r.bytes / found.chain_bytes, 4),
                    "to_exact": round(r.bytes / found.exact_bytes, 4),
                }
                for r in found.rows
            ],
        }  # fmt: skip

    def shown(self, document: Document) -> Iterator[Table | str]:
        columns: Columns = [
            ("way", "way"),
            ("artifacts", "artifacts"),
            ("bytes", "{bytes:,}"),
            ("÷ every delta", "{to_chain:.2f}"),
            ("÷ one exact squash", "{to_exact:.2f}"),
            ("s", "{seconds:.2f}"),
        ]
        yield table(document["rows"], columns)
        yield filled(
            "{versions} versions behind, {state_bytes:,} bytes of state, {codec}, {rate_bits_s:Mbit/s g} Mbit/s; every "
            "delta {chain_bytes:,} bytes, one exact squash {exact_bytes:,}. Seconds from joining to staged, which "
            "include making a squash",
            document,
        )


@dataclass(frozen=True, slots=True)
class HealMeasurement(Measurement):
    """Measure bytes and time for the repair of corrupt cells of a peer's shadow.

    The peer's disk has the artifacts, or has lost them. A peer that has lost its whole state is measured beside it.

    A hub and two peers run as processes on this machine; no privileges needed.
    """

    versions: int = setting(20, "Number of deltas after the hub's anchor.", 2)
    state_bytes: int = setting(
        128, "Size of the weights in MiB, in cells of 8 MiB.", 40, name="state_mib", flag="state", unit=MIB
    )
    rate: float = setting("100mbit", "Rate of every link in bits per second.", type=RateParameter())
    deadline: float = setting(120.0, "Time limit for a repair in seconds.", 1)

    def measure(self) -> Document:
        from netem.bench.repair_cost import repair

        with tempfile.TemporaryDirectory(prefix="p2pcast-bench-", dir="/dev/shm") as folder:
            found = event_loop.run(repair(Path(folder), self.state_bytes, self.versions, self.rate / 8, self.deadline))
        return {
            "versions": self.versions, "rate_bits_s": self.rate, "state_bytes": found.state_bytes,
            "listed_bytes": found.listed_bytes,
            "rows": [
                {
                    "harm": r.damage.what, "cell_bytes": r.cell_bytes, "pieces_bytes": r.pieces_bytes,
                    "wire_bytes": r.wire_bytes, "to_cells": round(r.pieces_bytes / r.cell_bytes, 4),
                    "seconds": round(r.seconds, 3),
                }
                for r in found.rows
            ],
        }  # fmt: skip

    def shown(self, document: Document) -> Iterator[Table | str]:
        columns: Columns = [
            ("damage", "harm"),
            ("bytes of the state", "{cell_bytes:,}"),
            ("piece bytes fetched", "{pieces_bytes:,}"),
            ("÷", "{to_cells:.2f}"),
            ("all bytes on the wire", "{wire_bytes:,}"),
            ("s", "{seconds:.2f}"),
        ]
        yield table(document["rows"], columns)
        yield filled(
            "{state_bytes:,} bytes of state; an anchor at the hub, then {versions} deltas and their squashes; "
            "{rate_bits_s:Mbit/s g} Mbit/s. Seconds from joining (for a running peer: from publishing the next version)"
            " to the newest version staged",
            document,
        )


KINDS: Final = {
    "hub": "first cell to seal, at the hub",
    "peers": "first cell to staged at the last peer",
    "whole": "checkpoint's name to staged at the last peer",
}


@dataclass(frozen=True, slots=True)
class AnchorsMeasurement(Measurement):
    """Measure the time of versions while the hub writes an anchor, beside versions of the same run without an anchor.

    A hub and peers run as processes on this machine, each side with half of the cores; no privileges needed. Each
    version changes 1 % of the weights. It goes out as soon as the version before is staged at all peers.
    """

    versions: int = setting(80, "Number of timed versions.", 8)
    every: int = setting(4, "Number of versions between two anchors; the default of a hub is 50.", 2)
    state_bytes: int = setting(256, "Size of the weights in MiB.", 1, name="state_mib", flag="state", unit=MIB)
    peers: int = setting(2, "Number of peers, in one chain.", 1)
    on: Path | None = setting(
        None,
        "Folder for anchors, on the disk to measure.  [default: the temporary folder]",
        type=click.Path(file_okay=False, exists=True, path_type=Path),
    )
    deadline: float = setting(60.0, "Time limit for a version in seconds.", 1)

    def measure(self) -> Document:
        from netem.bench.anchor_cost import beside_anchors
        from netem.bench.measuring import quantile

        with (
            tempfile.TemporaryDirectory(prefix="p2pcast-bench-", dir="/dev/shm") as folder,
            tempfile.TemporaryDirectory(prefix="p2pcast-bench-", dir=self.on) as hub,
        ):
            found = event_loop.run(
                beside_anchors(
                    Path(folder), Path(hub), self.state_bytes, self.peers, self.versions, self.every, self.deadline
                )
            )

        def row(kind: str) -> dict[str, Any]:
            both = {}
            for name, beside in (("beside", True), ("alone", False)):
                values = [getattr(t, kind) for t in found.times if t.beside is beside]
                both[f"{name}_s"] = quantile(values, 0.5, 4)
                both[f"{name}_p90_s"] = quantile(values, 0.9, 4) if len(values) > 1 else None
            one, other = both["beside_s"], both["alone_s"]
            return {"what": kind, **both, "ratio": None if one is None or not other else round(one / other, 4)}

        return {
            "state_bytes": found.state_bytes, "peers": self.peers, "every": self.every,
            "anchors": len(found.anchors_s), "anchor_s": quantile(found.anchors_s, 0.5, 4),
            "beside": sum(t.beside for t in found.times), "alone": sum(not t.beside for t in found.times),
            "left_out": found.left_out, "rows": list(map(row, KINDS)),
        }  # fmt: skip

    def shown(self, document: Document) -> Iterator[Table | str]:
        columns: Columns = [
            ("seconds", lambda row: KINDS[row["what"]]),
            ("while an anchor is written", "{beside_s:.3f}"),
            ("p90", "{beside_p90_s:.3f}"),
            ("while none is", "{alone_s:.3f}"),
            ("p90", "{alone_p90_s:.3f}"),
            ("ratio", "{ratio:.2f}"),
        ]
        yield table(document["rows"], columns)
        yield filled(
            "{beside} versions beside {anchors} anchors of {state_bytes:,} bytes, {each_s:.2f} s each, and {alone} "
            "versions beside none; {left_out} versions overlap an anchor in part and are left out. Medians; {peers} "
            "peers",
            {**document, "each_s": document["anchor_s"] or 0},
        )


@dataclass(frozen=True, slots=True)
class SimulatedMeasurement(Measurement):
    """Compare the simulator with reality: the time to the last peer in broadcasts of real processes, in the same
    broadcasts simulated, and the ratio.

    The first broadcast calibrates the simulator (share of headers, time of a hop) and is not compared. The processes
    run on this machine behind proxies; no privileges needed.
    """

    peers: int = setting(6, "Number of peers, in two chains.", 4, 32)
    payload_bytes: int = setting(6, "Size of a version in MiB.", 1, name="payload", unit=MIB)
    rate: float = setting("16mbit", "Rate of the path between two processes, in bits per second.", type=RateParameter())
    only: tuple[str, ...] = setting(None, "First words of the scenarios to run; repeatable.", metavar="WORDS")
    rounds: int = setting(1, "Number of broadcasts of each scenario.", 1)
    deadline: float = setting(60.0, "Time limit for a broadcast in seconds.", 1)

    def measure(self) -> Document:
        from netem.bench.model_agreement import SCENARIOS, compare

        begin = tuple(f"{words} " for words in self.only)
        chosen = [name for name in SCENARIOS if not begin or f"{name} ".startswith(begin)]
        if not chosen:
            raise click.BadParameter("no scenario begins with these words", param_hint="--only")
        return event_loop.run(
            compare(self.peers, self.payload_bytes, self.rate / 8, chosen * self.rounds, self.deadline)
        )

    def shown(self, document: Document) -> Iterator[Table | str]:
        columns: Columns = [
            ("scenario", "scenario"),
            ("chains", lambda row: " · ".join(str(len(chain)) for chain in row["chains"])),
            ("measured, s", "{measured_s:.2f}"),
            ("simulated, s", "{simulated_s:.2f}"),
            ("ratio", "{ratio:.3f}"),
        ]
        yield table(document["rows"], columns)
        yield filled(
            "calibration from a separate broadcast: payload gets {share:.3f} of a path's rate, a hop adds "
            "{hop_s:ms .0f} ms to a piece's time",
            document,
        )


@dataclass(frozen=True, slots=True)
class BroadcastMeasurement(Measurement):
    """Measure the time to the last peer, divided by the payload at a peer's own rate, over rate-shaped links between
    network namespaces. Needs root.

    Every host is a namespace with processes of its own: `p2pcast seed`, and `p2pcast join` with a folder to install
    into. Rivals get the same bytes: bare chains of forwarding sockets, libtorrent, shardcast, and a star over HTTP. The
    rivals rsync and zstd get the whole state.
    """

    peers: tuple[int, ...] = setting((8, 16), "Number of peers; repeatable.", 1, 500)
    payload: float = setting(24.0, "Size of a version's delta in MiB.", 0.5)
    state: float = setting(
        32.0, "Size in MiB of the whole state for rsync, zstd and one row of p2pcast; 1 % of the state changes.", 1
    )
    uplink: float = setting("300mbit", "Rate of the hub's link in bits per second, each way.", type=RateParameter())
    peer_rate: float = setting(
        "100mbit", "Rate of every peer's link in bits per second, each way.", type=RateParameter()
    )
    rounds: int = setting(5, "Number of measured broadcasts per system.", 1)
    rivals: tuple[str, ...] = setting(
        RIVALS, "System to compare with, in the same run; repeatable.", choices=RIVALS, flag="rival"
    )
    no_rivals: bool = setting(False, "p2pcast alone, without other systems.")
    late: int = setting(
        0,
        "Number of peers that join and catch up during every second broadcast of p2pcast; adds a row with these and one"
        " without.",
        0,
        100,
    )
    plaintext: bool = setting(False, "A row of p2pcast without TLS, in addition.")
    congestion: str | None = setting(
        None, "TCP congestion control at every host.  [default: the machine's own]", metavar="NAME"
    )
    folder: Path | None = setting(
        None,
        "Parent of the work folder, which is removed at the end.  [default: the temporary folder]",
        type=PATH,
        flag="dir",
    )

    def measure(self) -> Document:
        from netem.broadcast.broadcast_comparison import BroadcastBench as Systems
        from netem.broadcast.broadcast_comparison import bench_broadcast

        def show(row: dict[str, Any]) -> None:
            if "skipped" in row:
                click.echo(f"{row['system']}, {row['peers']} peers: left out, {row['skipped']}", err=True)

        systems = Systems(
            tuple(dict.fromkeys(self.peers)), round(self.payload * MIB), self.uplink, self.peer_rate, self.rounds,
            () if self.no_rivals else tuple(dict.fromkeys(self.rivals)), self.congestion, self.folder, self.late,
            self.plaintext, round(self.state * MIB),
        )  # fmt: skip
        return bench_broadcast(systems, show)

    def shown(self, document: Document) -> Iterator[Table | str]:
        rows = [row for row in document["rows"] if "skipped" not in row]
        columns: Columns = [
            ("system", "system"),
            ("peers", "peers"),
            ("time to last, s", "{all_s:.3f}"),
            ("÷ ideal", "{all_over_ideal:.3f}"),
            ("of each round", lambda row: " ".join(f"{ratio:.2f}" for ratio in row["every_over_ideal"])),
            ("staged, s", "{staged_s:.3f}"),
            ("moved, MB", lambda row: f"{moved / 1e6:.2f}" if (moved := row["settings"].get("moved_bytes")) else ""),
            ("CPU s, all · busiest", "{cpu_s:.1f} · {busiest_cpu_s:.2f}"),
            ("machine", "{machine_busy:.0%}"),
        ]
        yield table(rows, columns)
        ideal_s = next(row["ideal_s"] for row in document["rows"] if "ideal_s" in row)
        yield (
            f"ideal: {self.payload:g} MiB at {self.peer_rate / 1e6:g} Mbit/s, {ideal_s:.3f} s; congestion control: "
            f"{document['congestion']}"
        )
        for alone, beside in pairwise(document["rows"]) if self.late else ():
            if "late" in beside.get("settings", {}):
                still = beside["settings"]["still_fetching"]
                yield (
                    f"{alone['peers']} peers: {beside['all_s'] / alone['all_s'] - 1:+.1%} to the last peer while "
                    f"{beside['settings']['late']} other peers catch up ({sum(still) / len(still):.0%} of these still "
                    "catching up when the last peer had all)"
                )
        if any(row["machine_busy"] > CROWDED for row in rows):
            yield (
                "the machine's cores were nearly all in use: the processor, and not only the links, limits these times"
            )


relay = command(RelayMeasurement)
catchup = command(CatchupMeasurement)
heal = command(HealMeasurement)
anchors = command(AnchorsMeasurement)
simulated = command(SimulatedMeasurement)
broadcast = command(BroadcastMeasurement)
