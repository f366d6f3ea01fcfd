"""What a soak has shown, as one document: ``p2pcast bench soak --json``. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any, Final

from netem.flat import Trend, trend
from netem.fleet import HUB
from netem.gauge import Reading
from netem.soak import Life, Rest, Round, Soak
from p2pcast.limits import MIB
from p2pcast.relay.node import CACHE_BYTES
from p2pcast.store.writeback import BACKLOG_HIGH_BYTES

WARM_S: Final = 15.0
"""Of a process's life, before its readings count: kernels load, buffers find their size."""
MEMORY_BYTES: Final = CACHE_BYTES + BACKLOG_HIGH_BYTES
"""A process may grow by what it may rightly hold of pieces: for children that lag behind, and for a disk that does. What was needed once stays with the allocator."""
HUB_SHARE: Final = 2
"""The hub may grow by so many times as much: it reads old versions for all who come back, and joins deltas, and what that took stays with the allocator, too."""
TYPICAL_BYTES: Final = 8 * MIB
"""The middle one of all processes may grow by this alone."""
DESCRIPTORS: Final = 16
"""May come and go: a peer has two stripes to its parent and to each of up to two children, and as many again while it moves; the hub has more, and the fleet's sum tells."""
TASKS: Final = 8

Document = dict[str, Any]
Value = Callable[[Reading], float]

_HELD: Final[dict[str, tuple[Value, float]]] = {
    "anonymous_bytes": (lambda r: r.anonymous_bytes, MEMORY_BYTES),
    "descriptors": (lambda r: r.descriptors, DESCRIPTORS),
    "tasks": (lambda r: r.tasks, TASKS),
}


def document(soak: Soak) -> Document:
    """Everything; ``ok`` says whether the rule held."""
    processes = [_process(life) for life in soak.lives.values()]
    rests = [_rest(rest) for rest in soak.rests]
    duplicate = sum(life.duplicate_bytes for life in soak.lives.values())
    grown = [row["name"] for row in processes if not row["flat"]]
    calm = [r for r in soak.rounds if r.calm]
    stormy = [r for r in soak.rounds if not r.calm and not r.hub_struck]
    growths = [row["trends"]["anonymous_bytes"]["growth"] for row in processes if row["trends"]["anonymous_bytes"] is not None]
    typical = median(growths) if growths else 0.0
    fleet_flat = typical <= TYPICAL_BYTES and all(
        rests[1][held] <= rests[0][held] + 2 * DESCRIPTORS for held in ("descriptors", "tasks")
    )
    return {
        "ok": not soak.wrong and not grown and fleet_flat,
        "undisturbed_s": _middle([max(r.times_s.values()) for r in calm[1:]]),
        "last_median_s": _middle([max(r.times_s.values()) for r in stormy if r.times_s]),
        "last_worst_s": max((max(r.times_s.values()) for r in stormy if r.times_s), default=None),
        "wrong": soak.wrong,
        "bytes_duplicate": duplicate,
        "grown": grown,
        "fleet_flat": fleet_flat,
        "typical_growth_bytes": round(typical),
        "judged": len(growths),
        "blows": dict(Counter(s.blow.what for s in soak.struck)),
        "rests": rests,
        "rows": [_row(r) for r in soak.rounds],
        "events": [{"t_s": round(s.t_s, 2), "what": s.blow.what, "peer": s.blow.name} for s in soak.struck],
        "processes": processes,
    }


def _middle(values: Iterable[float]) -> float | None:
    found = list(values)
    return round(median(found), 3) if found else None


def _row(this: Round) -> Document:
    times = sorted(this.times_s.values())
    return {
        "step": this.step,
        "t_s": round(this.t_s, 2),
        "calm": this.calm,
        "hub_struck": this.hub_struck,
        "waited_for": this.waited_for,
        "undisturbed": len(times),
        "median_s": _middle(times),
        "last_s": round(times[-1], 3) if times else None,
        "last": max(this.times_s, key=this.times_s.__getitem__, default=None),
    }


def _process(life: Life) -> Document:
    """``flat``: also where its life was too short to say."""
    warm = [r for r in life.readings if r.t_s >= life.readings[0].t_s + WARM_S]
    share = HUB_SHARE if life.name == HUB else 1
    trends = {held: trend([(r.t_s, value(r)) for r in warm], share * allowed) for held, (value, allowed) in _HELD.items()}
    return {
        "name": life.name,
        "pid": life.pid,
        "seconds": round(life.readings[-1].t_s - life.readings[0].t_s, 1),
        "bytes_duplicate": life.duplicate_bytes,
        "flat": all(t is None or t.flat for t in trends.values()),
        "trends": {held: None if t is None else _trend(t) for held, t in trends.items()},
        "readings": [
            [round(r.t_s, 1), r.anonymous_bytes, r.pss_bytes, r.descriptors, r.sockets, r.threads, r.tasks, round(r.cpu_s, 2)]
            for r in life.readings
        ],
    }


def _trend(found: Trend) -> Document:
    return {"level": round(found.level), "growth": round(found.growth, 1), "flat": found.flat}


def _rest(rest: Rest) -> Document:
    """Sums over all processes, and what they cost while they had nothing to do."""
    last = rest.last
    used = {n: (r.cpu_s - rest.first[n].cpu_s) / rest.seconds for n, r in last.items() if n in rest.first}
    peers = [share for n, share in used.items() if n != HUB]
    return {
        "processes": len(last),
        "anonymous_bytes": sum(r.anonymous_bytes for r in last.values()),
        "pss_bytes": sum(r.pss_bytes for r in last.values()),
        "descriptors": sum(r.descriptors for r in last.values()),
        "sockets": sum(r.sockets for r in last.values()),
        "tasks": sum(r.tasks for r in last.values()),
        "hub_anonymous_bytes": last[HUB].anonymous_bytes,
        "hub_cpu": round(used[HUB], 4),
        "peer_cpu": round(sum(peers) / max(1, len(peers)), 4),
        "log_bytes_s": round(rest.log_bytes / rest.seconds, 1),
    }
