"""What has happened at a peer: told as events, and measured by the peer's own clock alone.

Engines are compared with how they were when last looked at, whoever changed them: a commit, a check that found a restarted server, a barrier that they missed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric

from p2pcast import metrics
from p2pcast.events import Events
from p2pcast.http import Document
from p2pcast.version import Version
from rollout_node.installers.base import CommitReport

KEPT = 256
"""Versions whose times are remembered."""


@dataclass(frozen=True, slots=True)
class EngineNow:
    """``row``: as in /status. ``commits``: how many there have been, ``report`` is the last one's. ``fault``: what its last step failed with."""

    row: Document
    commits: int
    report: CommitReport | None
    fault: str | None


class Chronicle:
    """``now`` is the loop's clock in seconds."""

    def __init__(self, events: Events) -> None:
        self.recomputed_tokens: Counter[str] = Counter()
        """Engine → in all."""
        self.refused_installs: Counter[str] = Counter()
        """Engine → how often an install failed, or was refused by it; one that fails again for the same reason counts once."""
        self.refused_versions = 0
        self.healed_cells = 0
        self.healing_bytes = 0
        self._events = events
        self._opened: dict[Version, float] = {}
        self._staged: dict[Version, float] = {}
        self._engines: dict[str, EngineNow] = {}
        self._live: dict[str, Version] = {}
        """Engine → the newest version that it has been measured with."""
        self._parent: bytes | None = None
        self._to_staged = metrics.Histogram(
            "p2pcast_peer_opened_to_staged_seconds",
            "From a version's first word here to its staging",
            [], metrics.SECONDS,
        )  # fmt: skip
        self._to_live = metrics.Histogram(
            "p2pcast_peer_staged_to_live_seconds",
            "From a version's staging to an engine that serves it",
            ["engine"], metrics.SECONDS,
        )  # fmt: skip
        self._pauses = metrics.Histogram(
            "p2pcast_peer_commit_pause_seconds", "How long generation paused for a commit", ["engine"], metrics.PAUSES
        )

    def families(self) -> Iterable[Metric]:
        yield self._to_staged.family()
        yield self._to_live.family()
        yield self._pauses.family()
        yield metrics.counters(
            "p2pcast_peer_recomputed_tokens", "Tokens computed anew because of commits", ["engine"],
            (([name], n) for name, n in self.recomputed_tokens.items()),
        )  # fmt: skip
        yield metrics.counters(
            "p2pcast_peer_refused_installs", "Installs that failed or were refused", ["engine"],
            (([name], n) for name, n in self.refused_installs.items()),
        )  # fmt: skip
        yield metrics.counter(
            "p2pcast_peer_refused_versions", "Versions refused before the shadow changed", self.refused_versions
        )
        yield metrics.counter(
            "p2pcast_peer_healed_cells", "Cells of the shadow that had rotted and were put right", self.healed_cells
        )
        yield metrics.counter("p2pcast_peer_healing_bytes", "Piece bytes fetched to put cells right", self.healing_bytes)

    # -- versions

    def receiving(self, version: Version, base: Version | None, now: float) -> None:
        _remember(self._opened, version, now)
        self._events.emit("receiving", version=str(version), base=None if base is None else str(base))

    def received(self, version: Version, took_s: float) -> None:
        """All of it is verified and in the store's log; ``took_s``: from its first word to its last piece."""
        self._events.emit("received", version=str(version), took_s=round(took_s, 6))

    def aborted(self, version: Version) -> None:
        self._opened.pop(version, None)
        self._events.emit("aborted", version=str(version))

    def staged(self, version: Version, now: float) -> None:
        _remember(self._staged, version, now)
        opened = self._opened.pop(version, None)
        after_s = None if opened is None else round(now - opened, 6)
        if after_s is not None:
            self._to_staged.observe(after_s)
        self._events.emit("staged", version=str(version), after_s=after_s)

    def refused(self, version: Version, why: str) -> None:
        self.refused_versions += 1
        self._events.emit("refused", version=str(version), why=why)

    def healed(self, version: Version, cells: int, fetched_bytes: int) -> None:
        """Cells of the shadow that had rotted are right again; ``fetched_bytes``: what came over the network for that."""
        self.healed_cells += cells
        self.healing_bytes += fetched_bytes
        self._events.emit("healed", version=str(version), cells=cells, bytes=fetched_bytes)

    # -- neighbours

    def withheld(self, version: str, parent: bytes) -> None:
        """The hub has sealed the version, and the parent does not send it."""
        self._events.emit("withheld", version=version, parent=parent.hex())

    def attached(self, parent: bytes | None) -> None:
        """Told as often as you like."""
        if parent != self._parent:
            self._parent = parent
            self._events.emit("parent", parent=None if parent is None else parent.hex())

    def hub(self, reachable: bool) -> None:
        self._events.emit("hub_back" if reachable else "hub_lost")

    # -- engines

    def look(self, engines: Sequence[EngineNow], now: float) -> None:
        """Told as often as you like: what has changed since the last time is news."""
        for engine in engines:
            name = engine.row["name"]
            self._look(name, self._engines.get(name), engine, now)
            self._engines[name] = engine

    def _look(self, name: str, was: EngineNow | None, engine: EngineNow, now: float) -> None:
        row = engine.row
        if engine.commits > (0 if was is None else was.commits) and engine.report is not None and row["committed"] is not None:
            self._committed(name, row["committed"], engine.report, now)
        if engine.fault is not None and engine.fault != (None if was is None else was.fault):
            self.refused_installs[name] += 1
            self._events.emit("install_failed", engine=name, version=row["staged"], why=engine.fault)
        ready_before = was is not None and was.row["ready"]
        if row["ready"] and not ready_before:
            self._events.emit("ready", engine=name, version=row["committed"])
        elif ready_before and not row["ready"]:
            self._events.emit("unready", engine=name, version=row["committed"], why=row["error"])

    def _committed(self, name: str, version: str, report: CommitReport, now: float) -> None:
        self._pauses.observe(report.pause_s, name)
        self.recomputed_tokens[name] += report.recomputed_tokens or 0
        live, staged, after_s = Version.parse(version), self._staged.get(Version.parse(version)), None
        if staged is not None and (name not in self._live or live > self._live[name]):
            # The same version once more is one that was lost: that says nothing about the way here.
            after_s = round(now - staged, 6)
            self._to_live.observe(after_s, name)
            self._live[name] = live
        self._events.emit(
            "committed", engine=name, version=version, pause_s=round(report.pause_s, 6),
            recomputed_tokens=report.recomputed_tokens, after_s=after_s,
        )  # fmt: skip


def _remember(times: dict[Version, float], version: Version, now: float) -> None:
    times.setdefault(version, now)
    if len(times) > KEPT:
        del times[next(iter(times))]
