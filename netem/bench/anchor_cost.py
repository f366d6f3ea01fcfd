"""Cost of writing an anchor for the versions published meanwhile: at the hub, and until the last peer has staged them.

A hub and peers run as processes on this machine; a version follows as soon as the previous one is staged at every peer.
The first versions after an anchor's beginning are published while it is written, and the others are not: both kinds
come from one run, in turns. The hub's state folder, to which anchors are written and synced, lies where the caller
says; all other files lie in memory. The hub has half of the cores and the peers the other half, as on separate
machines. Peers run an empty command for each version, since the speed of installers is not measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors

from netem.emulation.description import HUB
from netem.emulation.loopback import Net
from netem.fleet.daemon_http import EventReader, ReportedEvent
from netem.fleet.local_fleet import LocalFleet
from netem.fleet.processes import ChildProcess

CHANGED = 0.01
WARM = 2
"""Uncounted versions at the beginning."""


@dataclass(frozen=True, slots=True)
class AnchorTimes:
    """Seconds of one version. ``hub``: from its first cell to its seal. ``peers``: from its first cell until the last
    peer had staged it. ``whole``: from the rename of its folder on.
    """

    hub: float
    peers: float
    whole: float
    beside: bool
    """An anchor was being written for most of that time."""


@dataclass(frozen=True, slots=True)
class AnchorOutcome:
    times: list[AnchorTimes]
    anchors_s: list[float]
    """Seconds of writing each anchor."""
    left_out: int
    """Versions with an anchor for the smaller part of their time."""
    state_bytes: int


class AnchorFleet(LocalFleet):
    """Two checkpoints that differ in 1 % of their words, published in turns."""

    def publish(self) -> None:
        self.core.step += 1
        if self.step == 1:
            self._make()
        part = self.core.trained / f".step_{self.step}"
        part.mkdir(parents=True)
        os.link(self.folder / f"{self.step % 2}.safetensors", part / "model.safetensors")
        (part / "STABLE").touch()
        part.rename(part.with_name(f"step_{self.step}"))

    def _make(self) -> None:
        draw = np.random.default_rng(1)
        words = ((draw.standard_normal(self.payload_bytes // 2, dtype=np.float32) * 0.02).view(np.uint32) >> 16).astype(
            np.uint16
        )
        for name in ("1", "0"):
            spec = safetensors.TensorSpec(
                dtype="bfloat16", shape=[len(words) // 1024, 1024], data_ptr=words.ctypes.data, data_len=words.nbytes
            )
            safetensors.serialize_file({"w": spec}, self.folder / f"{name}.safetensors")
            words[draw.random(len(words), dtype=np.float32) < CHANGED] += 1

    def _run(self, name: str, words: list[str]) -> ChildProcess:
        if "--install" in words:
            words[words.index("--install") + 1] = "exec:true"
        else:
            words.append("--no-squashes")
        child = super()._run(name, words)
        if len(cores := sorted(os.sched_getaffinity(0))) > 1:
            half = len(cores) // 2
            os.sched_setaffinity(child.process.pid, cores[:half] if words[0] == "seed" else cores[half:])
        return child


async def beside_anchors(
    folder: Path, hub_folder: Path, state_bytes: int, peers: int, versions: int, every: int, deadline_s: float
) -> AnchorOutcome:
    """``folder``: in memory. Raises FleetError after the deadline."""
    os.environ["P2PCAST_SEED_ANCHOR_EVERY"] = str(every)
    fleet = AnchorFleet(folder, Net(1e12), peers, 1, state_bytes, deadline_s, "p2pcast.cli")
    fleet.core.states[HUB] = hub_folder
    published: dict[str, float] = {}
    async with fleet:
        hub = EventReader(lambda: fleet.core.connect(HUB), fleet.core.state(HUB) / "http.token", HUB)

        async def arrived() -> bool:
            seen = [event.kind for event in hub.reported if event.facts.get("version") == fleet.version]
            return seen.count("staged") == peers and "sealed" in seen

        for _ in range(versions + WARM):
            fleet.publish()
            published[fleet.version] = time.time()
            await fleet.until(arrived, lambda: f"{fleet.version} at every peer")
        hub.close()
    return _outcome(hub.reported, dict(list(published.items())[WARM:]), state_bytes)


def _outcome(events: Sequence[ReportedEvent], published: Mapping[str, float], state_bytes: int) -> AnchorOutcome:
    """``events``: of the hub. ``published``: Unix time by version."""
    anchors = [(e.time_s - e.facts["took_s"], e.time_s) for e in events if e.kind == "kept" and e.facts["base"] is None]
    times, left_out = [], 0
    for version, named in published.items():
        at = {event.kind: event.time_s for event in events if event.facts.get("version") == version}
        opened, sealed, last = at["opened"], at["sealed"], at["staged"]
        share = sum(max(0.0, min(last, end) - max(opened, start)) for start, end in anchors) / (last - opened)
        if 0.0 < share < 0.5:
            left_out += 1
            continue
        times.append(AnchorTimes(sealed - opened, last - opened, last - named, share > 0))
    return AnchorOutcome(times, [end - start for start, end in anchors], left_out, state_bytes)
