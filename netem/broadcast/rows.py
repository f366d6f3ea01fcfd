"""The rows of a comparison. Pure.

Each broadcast has one time a peer, from its beginning. A row has the medians of several broadcasts. ``ideal_s`` is the
payload at a peer's own rate: no broadcast can be faster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class MeasuredBroadcast:
    """One broadcast. ``times_s``: until each peer had the payload. ``cpu_s``: of each process, by name. ``busy``: share
    of the machine's cores in use, by any process. ``staged_s``: until the last peer could install it, if measured.
    ``by_peer_s``: the times by name, if measured.
    """

    times_s: Sequence[float]
    cpu_s: Mapping[str, float]
    busy: float
    staged_s: float | None = None
    by_peer_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BroadcastSeries:
    """A system's broadcasts of ``payload_bytes`` each. ``settings``: needed to repeat the run."""

    system: str
    payload_bytes: int
    rounds: Sequence[MeasuredBroadcast]
    settings: Mapping[str, Any] = field(default_factory=dict)


def ideal_s(payload_bytes: int, peer_bps: float) -> float:
    return 8.0 * payload_bytes / peer_bps


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def row(ran: BroadcastSeries, peers: int, peer_bps: float) -> dict[str, Any]:
    ideal = ideal_s(ran.payload_bytes, peer_bps)
    last = [max(r.times_s) for r in ran.rounds]
    staged = [r.staged_s for r in ran.rounds if r.staged_s is not None]
    return {
        "system": ran.system,
        "peers": peers,
        "payload_bytes": ran.payload_bytes,
        "ideal_s": round(ideal, 4),
        "p90_s": round(median(quantile(r.times_s, 0.9) for r in ran.rounds), 4),
        "all_s": round(median(last), 4),
        "all_over_ideal": round(median(last) / ideal, 4),
        "every_over_ideal": [round(s / ideal, 4) for s in last],
        "staged_s": round(median(staged), 4) if staged else None,
        "cpu_s": round(median(sum(r.cpu_s.values()) for r in ran.rounds), 3),
        "busiest_cpu_s": round(median(max(r.cpu_s.values()) for r in ran.rounds), 3),
        "machine_busy": round(median(r.busy for r in ran.rounds), 3),
        "settings": dict(ran.settings),
    }


def left_out(system: str, peers: int, why: str) -> dict[str, Any]:
    """A row with the reason for missing figures."""
    return {"system": system, "peers": peers, "skipped": why}
