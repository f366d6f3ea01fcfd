"""The bar of a hub and three peers as processes on loopback. It measures the hub's start, the time of a delta of some
20 kB to the last peer, a peer's memory, and the hub's shutdown.
"""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path
from statistics import median
from typing import Final

from netem.bench.measuring import Peak
from netem.emulation.description import HUB
from netem.fleet.fleet import Fleet, Loopback
from netem.fleet.processes import Processes
from netem.guard.saved_steps import State, moved, save, step
from netem.guard.source_trees import SourceTree

PEERS: Final = ("p1", "p2", "p3")
STATE_MIB: Final = 16
CHANGED: Final = 12_000
"""Changed words of a small delta: some 20 kB."""
VERSIONS: Final = 5
DEADLINE_S: Final = 60.0


def measured(tree: SourceTree, folder: Path) -> dict[str, float]:
    """Seconds and bytes by figure. ``folder``: empty, in tmpfs, so that disks do not count. Raises LocalError."""
    state, _ = step(STATE_MIB)
    with (
        Processes(folder) as processes,
        contextlib.closing(Fleet(Loopback(tree.environment), processes, folder, folder)) as fleet,
    ):
        fleet.trained.mkdir()
        _start_hub(fleet)
        for name in PEERS:
            fleet.peer(name)
            _until_up(fleet, name)
        save(fleet.trained / "step_1", state)
        _last_staged(fleet, 1)
        peak = Peak(processes.pids["p1"])
        peak.start()
        took = [_publish(fleet, number, _next(state, number)) for number in range(2, 2 + VERSIONS)]
        memory = peak.stop()
        began, hub = time.monotonic(), processes.children[HUB]
        hub.expected = True
        hub.signal(signal.SIGTERM)
        hub.process.wait(DEADLINE_S)
        ended_s = time.monotonic() - began
        started_s = _start_hub(fleet)
    return {
        "hub start to answering": started_s,
        "hub SIGTERM to its end": ended_s,
        "20 kB delta to the last peer": median(took),
        "peer memory peak": float(memory),
    }


def _next(state: State, number: int) -> State:
    for at in range(2, number + 1):
        state = moved(state, CHANGED, at)
    return state


def _start_hub(fleet: Fleet) -> float:
    """Seconds from the start until the hub answers."""
    began = time.monotonic()
    fleet.hub(fleet.trained)
    _until_up(fleet, HUB)
    return time.monotonic() - began


def _until_up(fleet: Fleet, name: str) -> None:
    """Return when the daemon has written its ``daemon.json``, when it answers."""
    fleet.until((fleet.state(name) / "daemon.json").exists, f"answer of {name}", DEADLINE_S)


def _publish(fleet: Fleet, number: int, state: State) -> float:
    """Seconds from the checkpoint's rename to the last peer's staging, by this machine's clock."""
    save(fleet.trained / f"step_{number}", state)
    named = time.time()
    return _last_staged(fleet, number) - named


def _last_staged(fleet: Fleet, number: int) -> float:
    """Unix time of the last peer's staging. Raises LocalError."""
    return max(fleet.wait_for(name, "staged", DEADLINE_S, version=f"0.{number}").time_s for name in PEERS)
