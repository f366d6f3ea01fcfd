"""A peer's events, and the times between them by the peer's own clock.

Each engine is compared with its state at the last observation, because several causes may have changed it: a commit, a
check that found a restarted server, or a barrier that the engine missed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric

from p2pcast.ground.version import Version
from p2pcast.process.events import Events
from p2pcast.wire import messages
from rollout_node import peer_metrics
from rollout_node.installers.installer import CommitReport

KEPT = 256
"""Number of versions whose times are remembered."""


@dataclass(frozen=True, slots=True)
class EngineNow:
    """An engine's /status ``row``, its number of ``commits`` so far, the last commit's ``report``, and ``fault``: the
    error of the engine's last step.
    """

    row: messages.EngineStatus
    commits: int
    report: CommitReport | None
    fault: str | None


class Timeline:
    """Emits events and measures times. ``now`` is the event loop's time in seconds."""

    def __init__(self, events: Events) -> None:
        self.recomputed_tokens: Counter[str] = Counter()
        """Engine → tokens recomputed since startup."""
        self.refused_installs: Counter[str] = Counter()
        """Engine → failed or refused installs. Consecutive failures for the same reason count once."""
        self.refused_versions = 0
        self.healed_cells = 0
        self.healing_bytes = 0
        self._events = events
        self._opened: dict[Version, float] = {}
        self._staged: dict[Version, float] = {}
        self._engines: dict[str, EngineNow] = {}
        self._live: dict[str, Version] = {}
        """Engine → the newest version for which the time from staged to live was measured."""
        self._parent: bytes | None = None
        self._to_staged = peer_metrics.OPENED_TO_STAGED()
        self._to_live = peer_metrics.STAGED_TO_LIVE()
        self._pauses = peer_metrics.COMMIT_PAUSE()

    def families(self) -> Iterable[Metric]:
        yield self._to_staged.family()
        yield self._to_live.family()
        yield self._pauses.family()
        yield peer_metrics.RECOMPUTED_TOKENS(([name], n) for name, n in self.recomputed_tokens.items())
        yield peer_metrics.REFUSED_INSTALLS(([name], n) for name, n in self.refused_installs.items())
        yield peer_metrics.REFUSED_VERSIONS(self.refused_versions)
        yield peer_metrics.HEALED_CELLS(self.healed_cells)
        yield peer_metrics.HEALING_BYTES(self.healing_bytes)

    # -- versions

    def receiving(self, version: Version, base: Version | None, now: float) -> None:
        _remember(self._opened, version, now)
        self._events.emit("receiving", version=str(version), base=None if base is None else str(base))

    def received(self, version: Version, took_s: float) -> None:
        """Record that every piece is verified and logged, ``took_s`` seconds after the opening."""
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
        """Record a repair of corrupt cells in the shadow, which fetched ``fetched_bytes`` over the network."""
        self.healed_cells += cells
        self.healing_bytes += fetched_bytes
        self._events.emit("healed", version=str(version), cells=cells, bytes=fetched_bytes)

    # -- neighbours

    def withheld(self, version: str, parent: bytes) -> None:
        """Record that the parent does not send a version that the hub has sealed."""
        self._events.emit("withheld", version=version, parent=parent.hex())

    def attached(self, parent: bytes | None) -> None:
        """Record the current parent. Repeated calls with the same parent emit nothing."""
        if parent != self._parent:
            self._parent = parent
            self._events.emit("parent", parent=None if parent is None else parent.hex())

    def hub(self, reachable: bool) -> None:
        self._events.emit("hub_back" if reachable else "hub_lost")

    # -- engines

    def observe(self, engines: Sequence[EngineNow], now: float) -> None:
        """Emit what has changed since the last call; a call without changes emits nothing."""
        for engine in engines:
            name = engine.row["name"]
            self._observe(name, self._engines.get(name), engine, now)
            self._engines[name] = engine

    def _observe(self, name: str, was: EngineNow | None, engine: EngineNow, now: float) -> None:
        row = engine.row
        if (
            engine.commits > (0 if was is None else was.commits)
            and engine.report is not None
            and row["committed"] is not None
        ):
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
            # An engine that lost the version gets it again, which says nothing about delivery time.
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
