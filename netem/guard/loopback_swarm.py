"""The bar of a hub and three peers as processes on loopback. It measures the hub's start, the time of a delta of some
20 kB to the last peer, a peer's memory, and the hub's shutdown.
"""

from __future__ import annotations

import json
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeVar

from netem.bench.measuring import Peak
from netem.fleet.processes import Child, Processes
from netem.guard.saved_steps import State, moved, save, step
from netem.guard.source_trees import Tree
from p2pcast.ground.errors import LocalError

PEERS: Final = ("p1", "p2", "p3")
STATE_MIB: Final = 16
CHANGED: Final = 12_000
"""Changed words of a small delta: some 20 kB."""
VERSIONS: Final = 5
DEADLINE_S: Final = 60.0
POLL_S: Final = 0.005

T = TypeVar("T")


def measured(tree: Tree, folder: Path) -> dict[str, float]:
    """Seconds and bytes by figure. ``folder``: empty, in tmpfs, so that disks do not count. Raises LocalError."""
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True)
    state, _ = step(STATE_MIB)
    with Processes(folder) as processes:
        swarm = _Swarm(tree, folder, processes)
        swarm.hub(checkpoints)
        for name in PEERS:
            swarm.peer(name)
        save(checkpoints / "step_1", state)
        for name in PEERS:
            swarm.staged(name, "0.1")
        peak = Peak(swarm.pid("p1"))
        peak.start()
        took = [swarm.publish(checkpoints, number, _next(state, number)) for number in range(2, 2 + VERSIONS)]
        memory = peak.stop()
        began = time.monotonic()
        swarm.child("hub").signal(signal.SIGTERM)
        swarm.child("hub").process.wait(DEADLINE_S)
        ended_s = time.monotonic() - began
        swarm.child("hub").expected = True
        started_s = swarm.hub(checkpoints)
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


class _Swarm:
    def __init__(self, tree: Tree, folder: Path, processes: Processes) -> None:
        self._tree = tree
        self._folder = folder
        self._processes = processes
        self._address = "127.0.0.1:0"

    def hub(self, checkpoints: Path) -> float:
        """Seconds until the hub answers."""
        took_s = self._start(
            "hub",
            "seed",
            checkpoints,
            "--token-file",
            self._folder / "token",
            "--listen",
            self._address,
            "--http",
            "127.0.0.1:0",
        )
        text = self.child("hub").log.read_text()
        self._address = text.rpartition(", listening on ")[2].partition(",")[0]
        return took_s

    def peer(self, name: str) -> None:
        target = f"safetensors:{self._folder / f'{name}-out'}"
        listen = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--name", name)
        self._start(name, "join", self._address, "--token-file", self._folder / "token", *listen, "--install", target)

    def child(self, name: str) -> Child:
        return self._processes.children[name]

    def pid(self, name: str) -> int:
        return self.child(name).process.pid

    def publish(self, checkpoints: Path, number: int, state: State) -> float:
        """Seconds from the checkpoint's rename to the last peer's staging, by this machine's clock."""
        save(checkpoints / f"step_{number}", state)
        named = time.time()
        return max(self.staged(name, f"0.{number}") for name in PEERS) - named

    def staged(self, name: str, version: str) -> float:
        """Unix time of the staging. Raises LocalError."""
        for kind, data in self._events(name):
            if kind == "staged" and data["version"] == version:
                when: float = data["time"]
                return when
        raise LocalError(f"{name} did not stage {version} within {DEADLINE_S:.0f} s")

    def _events(self, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """All events of a daemon from its start; ends after ``DEADLINE_S`` of silence."""
        url = json.loads((self._folder / name / "daemon.json").read_text())["http"]
        bearer = (self._folder / name / "http.token").read_text().strip()
        request = urllib.request.Request(f"{url}/events?since=0", headers={"Authorization": f"Bearer {bearer}"})
        kind = ""
        deadline = time.monotonic() + DEADLINE_S
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            for line in answer:
                key, _, value = line.decode().strip().partition(": ")
                if key == "event":
                    kind = value
                elif key == "data":
                    yield kind, json.loads(value)
                if time.monotonic() > deadline:
                    return

    def _start(self, name: str, *words: object) -> float:
        """Seconds from the start until the daemon writes its ``daemon.json``, when it answers."""
        ready = self._folder / name / "daemon.json"
        ready.unlink(missing_ok=True)
        places = ("--state", self._folder / name, "--shadow", self._folder / f"{name}-shadow")
        began = time.monotonic()
        command = [sys.executable, "-m", "p2pcast.cli", *map(str, words), *map(str, places)]
        self._processes.start(name, command, environment=self._tree.environment)
        self._until(ready.exists, f"{name} answers")
        took_s = time.monotonic() - began
        if name == "hub":
            self._until(lambda: ", listening on " in self.child("hub").log.read_text(), "the hub's address")
        return took_s

    def _until(self, condition: Callable[[], T], what: str) -> T:
        deadline = time.monotonic() + DEADLINE_S
        while not (found := condition()):
            self._processes.check()
            if time.monotonic() > deadline:
                raise LocalError(f"not within {DEADLINE_S:.0f} s: {what}")
            time.sleep(POLL_S)
        return found
