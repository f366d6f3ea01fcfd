"""What a peer's report says of its engines. What makes no sense was taken out of it when it was decoded (`p2pcast.wire.lenient`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from p2pcast.version import Version


@dataclass(frozen=True, slots=True)
class EngineRow:
    """``started``: the peer has reached it. ``ready``: fit for traffic, with ``committed``. ``pause_s``, ``recomputed_tokens``: of its last commit."""

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
        """It serves this version or a newer one."""
        return self.ready and self.committed is not None and self.committed >= version


def engine_rows(report: Mapping[str, Any]) -> list[EngineRow]:
    """The rows of ``report["engines"]``, a name once."""
    return [_row(row) for row in {row["name"]: row for row in report.get("engines", ())}.values()]


def _row(row: Mapping[str, Any]) -> EngineRow:
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
