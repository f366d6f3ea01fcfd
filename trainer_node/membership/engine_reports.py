"""A peer's engines, from its report. Invalid values were removed when the report was decoded
(`p2pcast.wire.lenient_report`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from p2pcast.ground import limits
from p2pcast.ground.version import Version
from p2pcast.wire.messages import EngineStatus, LiveEngine


@dataclass(frozen=True, slots=True)
class EngineRow:
    """``started``: the peer has reached the engine. ``ready``: the engine serves ``committed``. ``pause_s`` and
    ``recomputed_tokens`` describe its last commit.
    """

    name: str
    started: bool
    ready: bool
    staged: Version | None
    committed: Version | None
    pause_s: float | None = None
    recomputed_tokens: int | None = None
    error: str | None = None
    shown: Mapping[str, Any] = field(default_factory=dict)
    """The whole row, for /status."""

    def is_live(self, version: Version) -> bool:
        """Whether the engine serves this version or a newer one."""
        return self.ready and self.committed is not None and self.committed >= version


def engine_rows(engines: Iterable[EngineStatus]) -> list[EngineRow]:
    """The rows of a report's engines; if rows have the same name, the last one counts."""
    return [_row(row) for row in {row["name"]: row for row in engines}.values()]


class ReportingPeer(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def engines(self) -> Sequence[EngineRow]: ...


def live_rows(peers: Iterable[ReportingPeer]) -> list[LiveEngine]:
    """All peers' engines, as rows of LIVE: name, committed version, and whether the engine is ready."""
    rows = ((f"{peer.name}/{engine.name}", engine) for peer in peers for engine in peer.engines)
    return [(name[: limits.MAX_ENGINE_NAME], engine.committed, engine.ready) for name, engine in rows][
        : limits.MAX_ENGINES
    ]


def _row(row: EngineStatus) -> EngineRow:
    pause_s = row.get("pause_s")
    return EngineRow(
        name=row["name"],
        started=row.get("started", False),
        ready=row.get("ready", False),
        staged=_version(row.get("staged")),
        committed=_version(row.get("committed")),
        pause_s=None if pause_s is None else float(pause_s),
        recomputed_tokens=row.get("recomputed_tokens"),
        error=row.get("error"),
        shown=row,
    )


def _version(text: str | None) -> Version | None:
    return None if text is None else Version.parse(text)
