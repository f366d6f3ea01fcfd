"""The screen of the broadcast's demo: its versions and its peers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.table import Table

from netem.demo.board import Board
from netem.fleet.traffic import TrafficCounts


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One version, when all running peers had committed it. ``None``: not measured."""

    version: str
    bytes: int
    dense_bytes: int
    changed: int
    params: int
    encode_s: float
    time_to_last_s: float | None
    pause_s: float | None
    recomputed_tokens: int | None
    accuracy: float | None

    @property
    def ratio(self) -> float:
        return self.dense_bytes / max(1, self.bytes)

    @property
    def changed_share(self) -> float:
        return self.changed / max(1, self.params)

    def cells(self) -> list[str]:
        return [
            self.version,
            f"{self.bytes / 1e3:.1f} kB",
            f"{self.ratio:.0f} x",
            f"{self.changed_share:.2%}",
            milliseconds(self.time_to_last_s),
            milliseconds(self.pause_s),
            "-" if self.accuracy is None else f"{self.accuracy:.0%}",
        ]

    def line(self) -> str:
        _, size, ratio, share, last, pause, right = self.cells()
        return (
            f"version {self.version}: delta {size}, {ratio} smaller than dense, {share} of the values changed, "
            f"at the last peer after {last}, vLLM pause {pause}, {right} of unseen sums right"
        )


COLUMNS = ("version", "delta", "smaller", "changed", "to last peer", "vLLM pause", "sums right")


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f} ms"


@dataclass(slots=True)
class BroadcastView:
    """All displayed data of the broadcast's demo."""

    phase: str = ""
    rows: list[VersionRow] = field(default_factory=list)
    peers: list[dict[str, Any]] = field(default_factory=list)
    down: set[str] = field(default_factory=set)
    counts: TrafficCounts | None = None

    def picture(self, elapsed_s: float) -> Group:
        versions = Table(*COLUMNS)
        for row in self.rows:
            versions.add_row(*row.cells())
        peers = Table("peer", "parent", "state", "progress", "staged", "committed", "received")
        for peer in self.peers:
            progress = peer.get("progress")
            peers.add_row(
                str(peer["name"]),
                str(peer["parent"]),
                str(peer.get("state") or ""),
                f"{progress['version']} {progress['pieces']}/{progress['of']}" if progress else "",
                str(peer.get("staged") or "-"),
                str(peer.get("committed") or "-"),
                f"{(peer.get('bytes_received') or 0) / 1e3:.0f} kB",
            )
        for name in sorted(self.down):
            peers.add_row(name, "", "killed")
        line = f"{elapsed_s:.0f} s  {self.phase}"
        if self.counts is not None:
            line += f"    requests: {self.counts.ok} ok, {self.counts.failed} failed, {self.counts.tokens} tokens"
        return Group(versions, peers, line)


class VersionBoard(Board):
    def __init__(self, console: Console) -> None:
        self.view = BroadcastView()
        super().__init__(console, self.view)

    def version(self, row: VersionRow) -> None:
        self.view.rows.append(row)
        if not self.live:
            self.event(row.line())
        self.refresh(now=True)
