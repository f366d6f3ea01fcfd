"""A run's recent past, from events: times at which each version arrived. Pure.

Guarantee: memory is bounded, whatever the events are. A malformed event changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

VERSIONS_KEPT: Final = 16
ROWS_SHOWN: Final = 64
"""Peers and engines of one version that are named, slowest first."""

Facts = Mapping[str, Any]
Document = dict[str, Any]


@dataclass(slots=True)
class VersionSpread:
    """Of one version. ``density``: changed words of all words. ``staged``: peer → seconds after the opening. ``live``:
    peer and engine → seconds after the opening, and seconds of pause.
    """

    opened_s: float | None = None
    sealed_s: float | None = None
    bytes: int | None = None
    codec: str | None = None
    density: float | None = None
    staged: dict[str, float] = field(default_factory=dict)
    live: dict[str, tuple[float, float]] = field(default_factory=dict)

    def document(self) -> Document:
        live = sorted(self.live.items(), key=lambda row: -row[1][0])
        return {
            "opened": self.opened_s,
            "sealed_after": _between(self.opened_s, self.sealed_s),
            "bytes": self.bytes,
            "codec": self.codec,
            "density": self.density,
            "staged": _summary(list(self.staged.values())),
            "live": _summary([after_s for after_s, _ in self.live.values()]),
            "pause": _summary([pause_s for _, pause_s in self.live.values()]),
            "slowest": [[name, round(after_s, 4), round(pause_s, 4)] for name, (after_s, pause_s) in live[:ROWS_SHOWN]],
        }


class FleetHistory:
    """The recent past of a run. Only ``apply`` changes it."""

    def __init__(self) -> None:
        self.versions: dict[str, VersionSpread] = {}

    def apply(self, kind: str, time_s: float, facts: Facts) -> None:
        """Take in an event from the hub."""
        handler = _HANDLERS.get(kind)
        if handler is not None:
            try:
                handler(self, time_s, facts)
            except (KeyError, TypeError, ValueError, ArithmeticError):
                return

    def document(self) -> dict[str, Document]:
        """Return the history by version, oldest first."""
        return {version: spread.document() for version, spread in self.versions.items()}

    def _of(self, facts: Facts) -> VersionSpread:
        version = str(facts["version"])
        if version not in self.versions:
            self.versions[version] = VersionSpread()
            while len(self.versions) > VERSIONS_KEPT:
                del self.versions[next(iter(self.versions))]
        return self.versions.get(version, VersionSpread())

    def _opened(self, time_s: float, facts: Facts) -> None:
        self._of(facts).opened_s = time_s

    def _sealed(self, time_s: float, facts: Facts) -> None:
        spread, size = self._of(facts), int(facts["bytes"])
        spread.sealed_s, spread.bytes = time_s, size

    def _published(self, time_s: float, facts: Facts) -> None:
        spread, density = self._of(facts), _finite(facts["changed"]) / _finite(facts["params"])
        spread.codec, spread.density = str(facts["codec"] or "whole state"), round(density, 6)

    def _staged(self, time_s: float, facts: Facts) -> None:
        peer, after_s = str(facts["peer"]), _finite(facts["after_s"])
        self._of(facts).staged[peer] = after_s

    def _committed(self, time_s: float, facts: Facts) -> None:
        engine = f"{facts['peer']}/{facts['engine']}"
        live = _finite(facts["after_s"]), _finite(facts.get("pause_s") or 0.0)
        self._of(facts).live[engine] = live


_HANDLERS = {
    "opened": FleetHistory._opened,
    "sealed": FleetHistory._sealed,
    "published": FleetHistory._published,
    "staged": FleetHistory._staged,
    "committed": FleetHistory._committed,
}


def _finite(value: Any) -> float:
    """Raises TypeError, ValueError."""
    found = float(value)
    if not math.isfinite(found):
        raise ValueError
    return found


def _between(since_s: float | None, to_s: float | None) -> float | None:
    return None if since_s is None or to_s is None else round(to_s - since_s, 4)


def _summary(values: list[float]) -> Document | None:
    """Return the number of values, their median and the largest; None if there are none."""
    if not values:
        return None
    ordered = sorted(values)
    return {"count": len(ordered), "median": round(ordered[len(ordered) // 2], 4), "most": round(ordered[-1], 4)}
