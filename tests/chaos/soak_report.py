"""The results of a soak: one document, and its tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any, Final

import click
from rich.table import Table

from netem.emulation.description import HUB
from p2pcast.cli.options import console
from p2pcast.ground.limits import MIB
from p2pcast.relay.tuning import CACHE_BYTES
from p2pcast.store.write_behind import BACKLOG_HIGH_BYTES
from tests.chaos.leak_check import Trend, trend
from tests.chaos.process_stats import Reading
from tests.chaos.soak_run import IdlePeriod, ProcessHistory, Round, Soak

WARM_S: Final = 15.0
"""Age of a process before its readings count: kernels load and buffers reach their size."""
MEMORY_BYTES: Final = CACHE_BYTES + BACKLOG_HIGH_BYTES
"""Memory growth allowed for one process: the pieces that it may hold for slow children and for a slow disk. The
allocator keeps memory after its use.
"""
HUB_SHARE: Final = 2
"""Factor on the hub's allowance. The hub reads old versions for returning peers and joins deltas, and the allocator
keeps that memory.
"""
TYPICAL_BYTES: Final = 8 * MIB
"""Memory growth allowed for the median process."""
DESCRIPTORS: Final = 16
"""Descriptor growth allowed for one process. A peer has two stripes to its parent and to each of up to two children,
and as many again while it moves. The hub has more; the fleet's sum is checked separately.
"""
TASKS: Final = 8

Document = dict[str, Any]
Value = Callable[[Reading], float]

_HELD: Final[dict[str, tuple[Value, float]]] = {
    "anonymous_bytes": (lambda r: r.anonymous_bytes, MEMORY_BYTES),
    "descriptors": (lambda r: r.descriptors, DESCRIPTORS),
    "tasks": (lambda r: r.tasks, TASKS),
}


def document(soak: Soak) -> Document:
    """The whole document; ``ok`` tells whether the rule held."""
    processes = [_process(history) for history in soak.histories.values()]
    idle_periods = [_idle(rest) for rest in soak.idle_periods]
    duplicate = sum(row["bytes_duplicate"] for row in processes)
    grown = [row["name"] for row in processes if not row["flat"]]
    undisturbed = [r for r in soak.rounds if r.undisturbed]
    disturbed = [r for r in soak.rounds if not r.undisturbed and not r.hub_struck]
    growths = [
        row["trends"]["anonymous_bytes"]["growth"] for row in processes if row["trends"]["anonymous_bytes"] is not None
    ]
    typical = median(growths) if growths else 0.0
    fleet_flat = typical <= TYPICAL_BYTES and all(
        idle_periods[1][held] <= idle_periods[0][held] + 2 * DESCRIPTORS for held in ("descriptors", "tasks")
    )
    return {
        "ok": not soak.wrong and not grown and fleet_flat,
        "undisturbed_s": _middle([max(r.times_s.values()) for r in undisturbed[1:]]),
        "last_median_s": _middle([max(r.times_s.values()) for r in disturbed if r.times_s]),
        "last_worst_s": max((max(r.times_s.values()) for r in disturbed if r.times_s), default=None),
        "wrong": soak.wrong,
        "bytes_duplicate": duplicate,
        "grown": grown,
        "fleet_flat": fleet_flat,
        "typical_growth_bytes": round(typical),
        "judged": len(growths),
        "blows": dict(Counter(s.fault.what for s in soak.faults)),
        "rests": idle_periods,
        "rows": [_row(r) for r in soak.rounds],
        "events": [{"t_s": round(s.t_s, 2), "what": s.fault.what, "peer": s.fault.name} for s in soak.faults],
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
        "calm": this.undisturbed,
        "hub_struck": this.hub_struck,
        "waited_for": this.waited_for,
        "undisturbed": len(times),
        "median_s": _middle(times),
        "last_s": round(times[-1], 3) if times else None,
        "last": max(this.times_s, key=this.times_s.__getitem__, default=None),
    }


def _process(history: ProcessHistory) -> Document:
    """``flat`` is also true if the process did not live long enough to judge."""
    warm = [r for r in history.readings if r.t_s >= history.readings[0].t_s + WARM_S]
    share = HUB_SHARE if history.name == HUB else 1
    trends = {
        held: trend([(r.t_s, value(r)) for r in warm], share * allowed) for held, (value, allowed) in _HELD.items()
    }
    return {
        "name": history.name,
        "pid": history.pid,
        "seconds": round(history.readings[-1].t_s - history.readings[0].t_s, 1),
        "bytes_duplicate": history.readings[-1].duplicate_bytes,
        "flat": all(t is None or t.flat for t in trends.values()),
        "trends": {held: None if t is None else _trend(t) for held, t in trends.items()},
        "readings": [
            [
                round(r.t_s, 1),
                r.anonymous_bytes,
                r.pss_bytes,
                r.descriptors,
                r.sockets,
                r.threads,
                r.tasks,
                round(r.cpu_s, 2),
            ]
            for r in history.readings
        ],
    }


def _trend(found: Trend) -> Document:
    return {"level": round(found.level), "growth": round(found.growth, 1), "flat": found.flat}


def _idle(rest: IdlePeriod) -> Document:
    """Sums over all processes, and their CPU time while idle."""
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


def show(document: Document) -> None:
    table = Table("version", "undisturbed peers", "median, s", "last of them, s")
    for row in document["rows"]:
        step = f"{row['step']}{' (calm)' if row['calm'] else ' (the hub, too)' if row['hub_struck'] else ''}"
        table.add_row(
            step,
            f"{row['undisturbed']} of {row['waited_for']}",
            *(f"{row[k]:.2f}" if row[k] else "" for k in ("median_s", "last_s")),
        )
    console().print(table)
    table = Table(
        "at rest",
        "processes",
        "memory, MiB",
        "of the hub",
        "descriptors",
        "tasks",
        "CPU of the hub",
        "of a peer",
        "log, bytes/s",
    )
    for name, rest in zip(("before", "after"), document["rests"], strict=True):
        table.add_row(
            name, str(rest["processes"]), f"{rest['pss_bytes'] / MIB:.0f}", f"{rest['hub_anonymous_bytes'] / MIB:.0f}",
            str(rest["descriptors"]), str(rest["tasks"]), f"{rest['hub_cpu']:.2%}", f"{rest['peer_cpu']:.2%}",
            f"{rest['log_bytes_s']:.0f}",
        )  # fmt: skip
    console().print(table)
    blows = ", ".join(f"{count} × {what}" for what, count in sorted(document["blows"].items()))
    click.echo(
        f"{blows}; {len(document['wrong'])} with wrong bits; {document['bytes_duplicate']} duplicate bytes; "
        f"{len(document['processes'])} processes. Memory of the {document['judged']} long-lived processes grew by "
        f"{document['typical_growth_bytes'] / MIB:.1f} MiB (median); {len(document['grown'])} processes grew beyond "
        "the "
        f"limit{': ' if document['grown'] else ''}{', '.join(document['grown'])}; "
        f"the fleet's memory {'is flat' if document['fleet_flat'] else 'has grown'}."
    )
