"""The demo's display: a live table on a terminal, otherwise a line for each version and each event."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from netem.demo.traffic import Counts

REFRESH_S = 0.25
"""Least interval between redraws, so that the display costs little."""


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
class View:
    """All displayed data."""

    phase: str = ""
    rows: list[VersionRow] = field(default_factory=list)
    peers: list[dict[str, Any]] = field(default_factory=list)
    down: set[str] = field(default_factory=set)
    counts: Counts | None = None


class Board:
    """On a terminal, ``console`` shows the live table."""

    def __init__(self, console: Console) -> None:
        self.view = View()
        self._console = console
        self._began = time.monotonic()
        self._drawn = float("-inf")
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None

    def __enter__(self) -> Board:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self.refresh(now=True)
            self._live.stop()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def phase(self, text: str) -> None:
        self.view.phase = text
        self.event(text)

    def event(self, text: str) -> None:
        self._console.print(f"{self.elapsed_s:6.1f} s  {text}", markup=False, highlight=False, soft_wrap=True)

    def version(self, row: VersionRow) -> None:
        self.view.rows.append(row)
        if self._live is None:
            self.event(row.line())
        self.refresh(now=True)

    def refresh(self, *, now: bool = False) -> None:
        if self._live is not None and (now or time.monotonic() - self._drawn > REFRESH_S):
            self._drawn = time.monotonic()
            self._live.update(self._picture(), refresh=True)

    def checks(self, checks: list[dict[str, Any]]) -> None:
        """Show the results of ``Check.document()``."""
        table = Table("", "check", "", title="independent check")
        for check in checks:
            table.add_row("pass" if check["ok"] else "FAIL", check["name"], check["detail"])
        self._console.print(table)

    def print_line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _picture(self) -> Group:
        view = self.view
        versions = Table(*COLUMNS)
        for row in view.rows:
            versions.add_row(*row.cells())
        peers = Table("peer", "parent", "state", "progress", "staged", "committed", "received")
        for peer in view.peers:
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
        for name in sorted(view.down):
            peers.add_row(name, "", "killed")
        line = f"{self.elapsed_s:.0f} s  {view.phase}"
        if view.counts is not None:
            line += f"    requests: {view.counts.ok} ok, {view.counts.failed} failed, {view.counts.tokens} tokens"
        return Group(versions, peers, line)
