"""What a siege does to a swarm: versions go out before, during and after it, and what processes hold is read all the while.

The rule: every version reaches every honest peer, bit for bit; nobody is sent a byte twice; no process ends; what it held during the siege it has given back afterwards.
Times are measured, and judged by nobody here.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from netem import gauge
from netem.fleet import HUB, Fleet, FleetError
from netem.gauge import Reading
from netem.siege.assault import PATIENCE_S
from netem.siege.kinds import orders

READ_S = 0.5
REST_S = PATIENCE_S
"""Behind the siege: whatever was held for its sake has a deadline below this."""
CALM = 3
"""Versions before the siege; then what processes hold is read for the first time."""


@dataclass(slots=True)
class Outcome:
    """``calm_s`` and ``siege_s``: from publishing until all had installed it, a figure a version. ``held``: name → before, at most, and afterwards."""

    calm_s: list[float] = field(default_factory=list)
    siege_s: list[float] = field(default_factory=list)
    lasted_s: float = 0.0
    tally: dict[str, int] = field(default_factory=dict)
    held: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    log_bytes: int = 0
    tracebacks: int = 0
    """In the logs: each one is an error that nobody had thought of."""
    duplicate_bytes: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def document(self) -> dict[str, Any]:
        return {
            "calm_s": round(median(self.calm_s), 3),
            "siege_s": round(median(self.siege_s), 3),
            "siege_worst_s": round(max(self.siege_s), 3),
            "versions": len(self.siege_s),
            "lasted_s": round(self.lasted_s, 1),
            "connections": self.tally["connections"],
            "frames": self.tally["frames"],
            "tally": self.tally,
            "cpu_s": self.cpu_s,
            "log_bytes": self.log_bytes,
            "tracebacks": self.tracebacks,
            "bytes_duplicate": self.duplicate_bytes,
            "wrong": self.wrong,
            "held": self.held,
        }


async def besiege(fleet: Fleet, connections: int, frames: int, at_once: int, seed: int, *, rest_s: float = REST_S) -> Outcome:
    """Raises FleetError when the swarm does not come through."""
    outcome = Outcome()
    for _ in range(CALM):
        outcome.calm_s.append(await _version(fleet, outcome))
    everyone = [HUB, *fleet.names]
    before = {name: await _read(fleet, name) for name in everyone}
    logged = {name: fleet.log(name).stat().st_size for name in everyone}
    most = dict(before)
    https = [await fleet.http_place(name) for name in everyone]
    places = [fleet.place(name) for name in everyone]
    given = orders(places, https, fleet.token, connections, frames, at_once, seed, tls=not fleet.plaintext)
    loop = asyncio.get_running_loop()
    began = loop.time()
    siege = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "netem.siege", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    over = asyncio.create_task(siege.communicate(given.text.encode()))
    watch = asyncio.create_task(_watch(fleet, most))
    try:
        while not over.done():
            outcome.siege_s.append(await _version(fleet, outcome))
        outcome.lasted_s = loop.time() - began
        if siege.returncode:
            raise FleetError(f"the siege itself failed with {siege.returncode}")
        outcome.tally = json.loads(over.result()[0])
        await asyncio.sleep(rest_s)
    finally:
        over.cancel()
        watch.cancel()
        if siege.returncode is None:
            siege.kill()
        await asyncio.wait([over, watch])
    await _version(fleet, outcome)
    for name in everyone:
        after = await _read(fleet, name)
        outcome.held[name] = {
            what: {"before": getattr(before[name], what), "most": getattr(most[name], what), "after": getattr(after, what)}
            for what in ("anonymous_bytes", "descriptors", "tasks")
        }
        outcome.cpu_s[name] = round(after.cpu_s - before[name].cpu_s, 2)
        outcome.log_bytes += fleet.log(name).stat().st_size - logged[name]
        outcome.tracebacks += fleet.log(name).read_text().count("Traceback")
    for name in fleet.names:
        outcome.duplicate_bytes += int((await fleet.answers(name))["bytes_duplicate"])
    return outcome


async def _version(fleet: Fleet, outcome: Outcome) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    fleet.publish()
    await fleet.live(*fleet.names)
    took_s = loop.time() - began
    outcome.wrong += [f"{name} at {fleet.version}" for name in fleet.names if not fleet.exact(name)]
    return took_s


async def _read(fleet: Fleet, name: str) -> Reading:
    await fleet.answers(name)
    text, pid = await fleet.asked(name, "metrics") or "", fleet.pid(name)
    found = None if pid is None or not text else gauge.read(pid, asyncio.get_running_loop().time(), gauge.said(text))
    if found is None:
        raise FleetError(f"{name} is gone")
    return found


async def _watch(fleet: Fleet, most: dict[str, Reading]) -> None:
    """Until cancelled."""
    while True:
        for name in most:
            now, was = await _read(fleet, name), most[name]
            both = {what: max(getattr(now, what), getattr(was, what)) for what in ("anonymous_bytes", "descriptors", "tasks")}
            most[name] = Reading(**{**{f: getattr(now, f) for f in Reading.__slots__}, **both})
        await asyncio.sleep(READ_S)
