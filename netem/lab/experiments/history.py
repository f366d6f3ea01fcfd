"""A whole run of a small real trainer, version by version. Rows state the size of each version, the anchors kept, and
the bytes that a new peer fetches at chosen points.

PULSE's chain (section 4.2, appendix G) has deltas and a whole state every 50 versions; a new peer fetches the newest
whole state and every delta since. The trainer is the demo's (a Qwen3 model learns to add by policy gradient, fp32
masters, bf16 published). Hub and peers are started as users start them, behind TLS. After each version the peer's
installed weights are compared with the trainer's by SHA-256. At ``points`` a new peer joins twice: p2pcast's way
(squashes where they save time) and PULSE's (``--squashes none``).
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from netem.emulation.description import HUB
from netem.emulation.namespaces import namespaces
from netem.emulation.streamed_rate import streamed
from netem.emulation.tables import bounded, filled
from netem.fleet.fleet import Fleet, emulated_fleet
from netem.lab.scenario import network_of
from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.ground.errors import UsageError
from p2pcast.store.retention import ANCHOR_EVERY

WAYS: Final = {"p2pcast": "auto", "PULSE": "none"}
"""A new peer's way → its value of --squashes."""
TRAINED_S: Final = 300.0
ANCHOR_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Parameters:
    """``group``: versions a row. ``points``: versions after which a new peer joins. ``pulse_delta``: the paper's mean
    delta ÷ its state.
    """

    versions: int = 200
    learning_rate: float = 3e-6
    hidden: int = 256
    group: int = 20
    points: tuple[int, ...] = (25, 49, 51, 99, 101, 150, 200)
    pulse_delta: float = 108e6 / 14e9

    def check(self) -> None:
        bounded(
            self,
            versions=(1, 10_000),
            learning_rate=(1e-9, 1),
            hidden=(128, 8192),
            group=(1, 10_000),
            pulse_delta=(0, 1),
        )
        if self.hidden % 128:
            raise UsageError(f"parameters.hidden is {self.hidden}: it must be a multiple of 128")
        if late := [point for point in self.points if not 1 <= point <= self.versions]:
            raise UsageError(f"parameters.points: {late[0]} is not a version from 1 to {self.versions}")


@dataclass(frozen=True, slots=True)
class VersionAtPeer:
    """A version at the peer. ``ready_s``: from the first step of publishing until the version was decoded and
    checked.
    """

    step: int
    bytes: int
    codec: str | None
    ready_s: float


def results(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    given = filled(Parameters, argument["parameters"], "parameters")
    given.check()
    with namespaces(network_of(argument)) as net:
        peers = net.network.peers
        if len(peers) != 2:
            raise UsageError("hosts: this experiment needs a hub, a peer and a peer that joins late")
        calibration = streamed(net, [(HUB, peer) for peer in peers])
        yield calibration
        if calibration["off"]:
            return
        with emulated_fleet(net) as run:
            yield from ({"row": row} for row in _Training(run, given, *peers).rows())


class _Training:
    def __init__(self, run: Fleet, given: Parameters, peer: str, late_peer: str) -> None:
        self._run, self._given = run, given
        self._peer, self._newcomer = peer, late_peer
        self._go = run.folder / "go"

    def rows(self) -> Iterator[dict[str, Any]]:
        run, given = self._run, self._given
        base = self._begin()
        self._state_bytes = Checkpoint.open(base).layout().nbytes
        run.step = 0
        run.hub(run.trained, "--base", base)
        run.until_joinable()
        run.peer(self._peer)
        run.wait_for(self._peer, "committed", version=run.version)
        done: list[VersionAtPeer] = []
        for step in range(1, given.versions + 1):
            done.append(self._next(step))
            if step in given.points:
                self._wait_for_anchor(step)
                yield from (self._join_late(step, way) for way in WAYS)
            if step % given.group == 0 or step == given.versions:
                yield self._versions(done[-((step - 1) % given.group + 1) :])
        yield self._whole(done)

    def _begin(self) -> Path:
        """Start the trainer; returns the base folder once the trainer has written it."""
        run, given = self._run, self._given
        words = [
            "--out",
            run.trained,
            "--versions",
            given.versions,
            "--lr",
            given.learning_rate,
            "--hidden",
            given.hidden,
        ]
        run.processes.start(
            "trainer", [sys.executable, "-P", "-m", "netem.demo.train", *map(str, words), "--go-file", str(self._go)]
        )
        self._until(run.trained / "base" / "STABLE")
        return run.trained / "base"

    def _until(self, path: Path) -> None:
        self._run.until(path.exists, f"{path.parent.name} from the trainer", TRAINED_S)

    def _next(self, step: int) -> VersionAtPeer:
        run = self._run
        if step == self._given.versions:
            run.processes.children["trainer"].expected = True  # the trainer ends after its last version
        run.step = step
        self._go.with_suffix(".part").write_text(str(step))
        self._go.with_suffix(".part").rename(self._go)
        self._until(run.trained / f"step_{step}" / "STABLE")
        line = run.timeline([self._peer])
        shutil.rmtree(run.trained / f"step_{step - 1}", ignore_errors=True)
        return VersionAtPeer(step, line.bytes, line.codec, line.staged_s[self._peer])

    def _wait_for_anchor(self, step: int) -> None:
        """Wait for the whole states that are due by then; the hub makes them beside its other work."""
        due = step // ANCHOR_EVERY
        self._run.until(lambda: len(self._kept()) >= due, f"whole state at {step - step % ANCHOR_EVERY}", ANCHOR_S)

    def _kept(self) -> list[str]:
        """Versions of which the hub has made a whole state."""
        return [
            str(t.facts["version"])
            for t in self._run.events[HUB].reported
            if t.kind == "kept" and t.facts["base"] is None
        ]

    def _join_late(self, step: int, way: str) -> dict[str, Any]:
        """From nothing to the newest version, compared bit for bit."""
        run, peer = self._run, self._newcomer
        run.peer(peer, "--squashes", WAYS[way])
        ready = run.wait_for(peer, "staged", version=run.version)
        run.live([peer])
        run.exact(peer)
        joined = max(t.time_s for t in run.events[HUB].reported if t.kind == "joined" and t.facts["peer"] == peer)
        received = int(run.get(peer)["bytes_received"])
        begun = [t for t in run.events[peer].reported if t.kind == "receiving"]
        anchor = next((str(t.facts["version"]) for t in begun if t.facts["base"] is None), None)
        run.leave(peer)
        run.forget(peer)
        theirs = 1 + (step % ANCHOR_EVERY) * self._given.pulse_delta
        return {
            "kind": "late_peer",
            "way": way,
            "version": step,
            "anchor": anchor,
            "artifacts": len({t.facts["version"] for t in begun}),
            "bytes": received,
            "to_state": round(received / self._state_bytes, 4),
            "theirs_to_state": round(theirs, 4),
            "ready_s": round(ready.time_s - joined, 3),
            "exact": True,
        }

    def _versions(self, done: Sequence[VersionAtPeer]) -> dict[str, Any]:
        mean = fmean(one.bytes for one in done)
        return {
            "kind": "versions",
            "version": done[-1].step,
            "versions": len(done),
            "bytes": round(mean),
            "most_bytes": max(one.bytes for one in done),
            "times_smaller": round(self._state_bytes / mean, 1),
            "codec": ", ".join(sorted({one.codec or "whole" for one in done})),
            "ready_s": round(median(one.ready_s for one in done), 3),
            "exact": True,
        }

    def _whole(self, done: Sequence[VersionAtPeer]) -> dict[str, Any]:
        """A row for the whole run. ``anchors``: made by the hub during the run, and the base."""
        kept = self._kept()
        deltas = sum(one.bytes for one in done)
        return {
            "kind": "run",
            "version": done[-1].step,
            "versions": len(done),
            "bytes": deltas,
            "anchors": 1 + len(kept),
            "anchored": " ".join(["0.0", *kept]),
            "state_bytes": self._state_bytes,
            "to_state": round(deltas / self._state_bytes, 4),
            "times_smaller": round(self._state_bytes * len(done) / deltas, 1),
            "twice_bytes": self._run.twice([self._peer]),
            "exact": True,
        }
