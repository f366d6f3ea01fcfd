"""Peers that were lost or have left, until they are back or forgotten. Pure; times are Unix seconds.

Guarantee: there are at most ``KEPT`` rows. Rows of peers that left cleanly are dropped before those of lost peers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

KEPT: Final = 64
LOST_SHOWN_S: Final = 86_400.0
LEFT_SHOWN_S: Final = 600.0


class GonePeers:
    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Any]] = {}

    def left(self, name: str, node: str, why: str, at_s: float, last: Mapping[str, Any]) -> None:
        """``why`` is empty after a goodbye. ``last``: other facts on the peer."""
        self.joined(name, node)
        if len(self._rows) >= KEPT:
            del self._rows[min(self._rows, key=lambda one: (self._rows[one]["lost"], self._rows[one]["at"]))]
        row = {"name": name, "node": node, "lost": bool(why), "why": why or None, "at": round(at_s, 3)}
        self._rows[node or name] = {**last, **row}

    def joined(self, name: str, node: str) -> None:
        """Remove the peer's row: the peer is back, or a different node has its name now."""
        for key in [key for key, row in self._rows.items() if key == (node or name) or row["name"] == name]:
            del self._rows[key]

    def rows(self, now_s: float) -> list[dict[str, Any]]:
        """Return the rows to show, newest first."""
        shown = [r for r in self._rows.values() if now_s - r["at"] <= (LOST_SHOWN_S if r["lost"] else LEFT_SHOWN_S)]
        return sorted(shown, key=lambda row: -row["at"])
