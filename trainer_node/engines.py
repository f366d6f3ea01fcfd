"""What a peer's report says of its engines. Peers report what they like: what makes no sense is left out, never an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from p2pcast import limits
from p2pcast.errors import UsageError
from p2pcast.version import Version

MAX_PAUSE_S = 1e6
"""More is no pause; it keeps sums of them finite."""


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
    """The rows of ``report["engines"]`` that make sense, a name once."""
    rows = report.get("engines")
    if not isinstance(rows, list):
        return []
    known = (_row(r) for r in rows[: limits.MAX_ENGINES] if isinstance(r, dict))
    return list({r.name: r for r in known if r is not None}.values())


def _row(row: Mapping[str, Any]) -> EngineRow | None:
    name, pause_s, tokens, error = (row.get(k) for k in ("name", "pause_s", "recomputed_tokens", "error"))
    if not isinstance(name, str) or not 0 < len(name) <= limits.MAX_ENGINE_NAME:
        return None
    return EngineRow(
        name=name,
        started=row.get("started") is True,
        ready=row.get("ready") is True,
        staged=_version(row.get("staged")),
        committed=_version(row.get("committed")),
        pause_s=float(pause_s) if isinstance(pause_s, int | float) and 0 <= pause_s <= MAX_PAUSE_S else None,
        recomputed_tokens=tokens if type(tokens) is int and tokens >= 0 else None,
        error=error[: limits.MAX_EVENT_TEXT] if isinstance(error, str) else None,
        shown=row,
    )


def _version(text: Any) -> Version | None:
    if not isinstance(text, str):
        return None
    try:
        version = Version.parse(text)
    except UsageError:
        return None
    return version if version.branch <= limits.MAX_BRANCH and version.step <= limits.MAX_STEP else None
