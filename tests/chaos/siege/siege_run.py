"""A siege of a running swarm: versions are published before, during and after it, and process resources are read all
the while.

The rule: every honest peer installs every version, bit for bit. No byte is sent to a peer twice. No process ends. Each
process afterwards releases the resources that it held during the siege. Times are measured and not judged here.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from netem.emulation.description import HUB
from netem.fleet.local_fleet import LocalFleet
from netem.fleet.processes import FleetError
from tests.chaos import daemon_logs, process_stats
from tests.chaos.process_stats import Reading
from tests.chaos.siege import attack_table

ROOT: Final = Path(__file__).parents[3]
HELD: Final = ("anonymous_bytes", "descriptors", "tasks")
READ_S = 0.5
REST_S = 15.0
"""Pause after the siege; every deadline of a daemon for an attack connection is shorter."""
UNDISTURBED_VERSIONS = 3
"""Versions before the siege; the first reading of resources follows them."""


@dataclass(slots=True)
class Outcome:
    """``calm_s`` and ``siege_s``: seconds from publishing until all peers had installed a version, one figure a
    version. ``held``: name → resource → before, most, after.
    """

    calm_s: list[float] = field(default_factory=list)
    siege_s: list[float] = field(default_factory=list)
    lasted_s: float = 0.0
    tally: dict[str, int] = field(default_factory=dict)
    held: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    log_bytes: int = 0
    unexpected: list[str] = field(default_factory=list)
    """Log lines."""
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
            "unexpected": self.unexpected,
            "bytes_duplicate": self.duplicate_bytes,
            "wrong": self.wrong,
            "held": self.held,
        }


async def run_siege(
    fleet: LocalFleet, connections: int, frames: int, at_once: int, seed: int, *, rest_s: float = REST_S
) -> Outcome:
    """Raises FleetError if the swarm does not deliver every version."""
    outcome = Outcome()
    for _ in range(UNDISTURBED_VERSIONS):
        outcome.calm_s.append(await _version(fleet, outcome))
    everyone = [HUB, *fleet.names]
    before = {name: await _read(fleet, name) for name in everyone}
    logged = {name: fleet.log(name).stat().st_size for name in everyone}
    most = dict(before)
    https = [await fleet.http_place(name) for name in everyone]
    places = [fleet.place(name) for name in everyone]
    given = attack_table.settings(
        places, https, fleet.token, connections, frames, at_once, seed, tls=not fleet.plaintext
    )
    loop = asyncio.get_running_loop()
    began = loop.time()
    siege = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        attack_table.__name__,
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    over = asyncio.create_task(siege.communicate(given.text.encode()))
    watch = asyncio.create_task(_watch(fleet, most))
    try:
        while not over.done():
            outcome.siege_s.append(await _version(fleet, outcome))
        outcome.lasted_s = loop.time() - began
        if siege.returncode:
            raise FleetError(f"the siege process failed with exit code {siege.returncode}")
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
            what: {
                "before": getattr(before[name], what),
                "most": getattr(most[name], what),
                "after": getattr(after, what),
            }
            for what in HELD
        }
        outcome.cpu_s[name] = round(after.cpu_s - before[name].cpu_s, 2)
        outcome.log_bytes += fleet.log(name).stat().st_size - logged[name]
    outcome.unexpected = daemon_logs.unexpected(fleet)
    for name in fleet.names:
        outcome.duplicate_bytes += int((await fleet.answers(name))["bytes_duplicate"])
    return outcome


async def _version(fleet: LocalFleet, outcome: Outcome) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    fleet.publish()
    await fleet.live(*fleet.names)
    took_s = loop.time() - began
    outcome.wrong += [f"{name} at {fleet.version}" for name in fleet.names if not fleet.exact(name)]
    return took_s


async def _read(fleet: LocalFleet, name: str) -> Reading:
    await fleet.answers(name)
    found = await process_stats.reading(fleet, name, asyncio.get_running_loop().time())
    if found is None:
        raise FleetError(f"{name} is gone")
    return found


async def _watch(fleet: LocalFleet, most: dict[str, Reading]) -> None:
    """Update ``most`` until cancelled."""
    while True:
        for name in most:
            now, was = await _read(fleet, name), most[name]
            most[name] = replace(now, **{what: max(getattr(now, what), getattr(was, what)) for what in HELD})
        await asyncio.sleep(READ_S)
