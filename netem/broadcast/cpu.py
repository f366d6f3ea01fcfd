"""CPU time of other processes and of the machine, from /proc."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def process_s(pid: int) -> float:
    """User and system time of a process so far: all threads, and children that have ended. 0 for a process that is
    gone.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(ticks) for ticks in fields[11:15]) * TICK_S


class CpuMeter:
    """CPU time since construction. ``pids``: by name."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._before = {name: process_s(pid) for name, pid in self._pids.items()}
        self._machine = _machine()

    def processes_s(self) -> dict[str, float]:
        """Processes that have ended are left out."""
        return {name: max(0.0, process_s(pid) - self._before[name]) for name, pid in self._pids.items()}

    def busy(self) -> float:
        """The share of all cores' time that was not idle."""
        idle, whole = (after - before for after, before in zip(_machine(), self._machine, strict=True))
        return 1 - idle / whole if whole else 0.0


def _machine() -> tuple[int, int]:
    """Ticks (idle, all)."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)
