"""Resources of a p2pcast process: from the kernel, and from its ``/metrics`` for counts that only the process knows."""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass
from pathlib import Path

from netem.fleet.local_fleet import LocalFleet

TICKS = os.sysconf("SC_CLK_TCK")
_ANONYMOUS = re.compile(rb"^Anonymous:\s+(\d+) kB", re.MULTILINE)
_WHOLE = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)
_SAID = re.compile(r"^(\w+) (\S+)$", re.MULTILINE)
"""A value without labels in a ``/metrics`` text."""


@dataclass(frozen=True, slots=True)
class Reading:
    """``anonymous_bytes``: without files and tmpfs. ``pss_bytes``: all mapped memory, with a proportional share of
    common pages. ``tasks``: of asyncio. ``duplicate_bytes``: received twice since the process started.
    """

    t_s: float
    anonymous_bytes: int
    pss_bytes: int
    descriptors: int
    sockets: int
    threads: int
    cpu_s: float
    tasks: int
    duplicate_bytes: int


async def reading(fleet: LocalFleet, name: str, t_s: float) -> Reading | None:
    """None for a process that is gone or does not answer, because it is frozen or still starting."""
    pid = fleet.pid(name)
    metrics = await fleet.get(name, "metrics")
    if pid is None or metrics is None or fleet.pid(name) != pid:
        return None
    return await asyncio.to_thread(read, pid, t_s, metrics)


def read(pid: int, t_s: float, metrics: str) -> Reading | None:
    """``metrics``: the process's ``/metrics``, just read. None if the process is gone."""
    said = {name: float(value) for name, value in _SAID.findall(metrics)}
    proc = Path("/proc") / str(pid)
    try:
        memory = (proc / "smaps_rollup").read_bytes()
        stat = (proc / "stat").read_bytes().rpartition(b")")[2].split()
        links = []
        for entry in os.scandir(proc / "fd"):
            try:
                links.append(os.readlink(entry.path))
            except FileNotFoundError:
                continue
    except OSError:
        return None
    anonymous, whole = _ANONYMOUS.search(memory), _WHOLE.search(memory)
    if anonymous is None or whole is None:
        return None
    cpu_s = (int(stat[11]) + int(stat[12])) / TICKS
    sockets = sum(link.startswith("socket:") for link in links)
    return Reading(
        t_s,
        1024 * int(anonymous[1]),
        1024 * int(whole[1]),
        len(links),
        sockets,
        int(stat[17]),
        cpu_s,
        round(said["p2pcast_tasks"]),
        round(said["p2pcast_duplicate_bytes_total"]),
    )
