"""Cost of writing an anchor for the versions published meanwhile: at the hub, and until the last peer has staged them.

A hub and peers run as processes on this machine; a version follows as soon as the previous one is staged at every peer.
The first versions after an anchor's beginning are published while it is written, and the others are not: both kinds
come from one run, in turns. The hub's state folder, to which anchors are written and synced, lies where the caller
says; all other files lie in memory. The hub has half of the cores and the peers the other half, as on separate
machines. Peers run an empty command for each version, since the speed of installers is not measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import safetensors

from netem.emulation.loopback import Net
from netem.fleet.local_fleet import HUB, Fleet
from netem.fleet.processes import Child, FleetError

CHANGED = 0.01
WARM = 2
"""Uncounted versions at the beginning."""


@dataclass(slots=True)
class VersionTimes:
    """Unix times of one version."""

    published: float = 0.0
    opened: float = 0.0
    sealed: float = 0.0
    staged: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one version. ``hub``: from its first cell to its seal. ``peers``: from its first cell until the last
    peer had staged it. ``whole``: from the rename of its folder on.
    """

    hub: float
    peers: float
    whole: float
    beside: bool
    """An anchor was being written for most of that time."""


@dataclass(frozen=True, slots=True)
class Outcome:
    times: list[Times]
    anchors_s: list[float]
    """Seconds of writing each anchor."""
    left_out: int
    """Versions with an anchor for the smaller part of their time."""
    state_bytes: int


class AnchorFleet(Fleet):
    """Two checkpoints that differ in 1 % of their words, published in turns."""

    def publish(self) -> None:
        self.step += 1
        if self.step == 1:
            self._make()
        part = self.folder / "checkpoints" / f".step_{self.step}"
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

    def _run(self, name: str, words: list[str]) -> Child:
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
) -> Outcome:
    """``folder``: in memory. Raises FleetError after the deadline."""
    os.environ["P2PCAST_SEED_ANCHOR_EVERY"] = str(every)
    fleet = AnchorFleet(folder, Net(1e12), peers, 1, state_bytes, deadline_s, "p2pcast.cli")
    fleet.states[HUB] = hub_folder
    async with fleet:
        watch = _HubEvents()
        task = asyncio.create_task(watch.follow(*await fleet.http_place(HUB)))
        try:
            await watch.wait(lambda: watch.connected, fleet, deadline_s)
            for _ in range(versions + WARM):
                fleet.publish()
                gone = watch.gone[fleet.version]
                gone.published = time.time()
                await watch.wait(lambda gone=gone: len(gone.staged) == peers and bool(gone.sealed), fleet, deadline_s)
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    return watch.outcome(list(watch.gone)[WARM:], state_bytes)


class _HubEvents:
    """Collects the events of the hub."""

    def __init__(self) -> None:
        self.connected = False
        self.gone: defaultdict[str, VersionTimes] = defaultdict(VersionTimes)
        self._anchors: list[tuple[float, float]] = []
        self._news = asyncio.Event()

    async def follow(self, host: str, port: int) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"http://{host}:{port}/events") as answer,
        ):
            self.connected = True
            self._news.set()
            kind = ""
            async for line in answer.content:
                word, _, rest = line.decode().rstrip("\n").partition(": ")
                if word == "event":
                    kind = rest
                elif word == "data":
                    self._take(kind, json.loads(rest))
                    self._news.set()

    def _take(self, kind: str, facts: dict[str, Any]) -> None:
        at = facts["time"]
        if kind == "opened":
            self.gone[facts["version"]].opened = at
        elif kind == "sealed":
            self.gone[facts["version"]].sealed = at
        elif kind == "staged":
            self.gone[facts["version"]].staged[facts["peer"]] = at
        elif kind == "kept" and facts["base"] is None:
            self._anchors.append((at - facts["took_s"], at))

    async def wait(self, done: Any, fleet: Fleet, deadline_s: float) -> None:
        """Raises FleetError."""
        try:
            async with asyncio.timeout(deadline_s):
                while not done():
                    self._news.clear()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._news.wait(), 1.0)
                    fleet.still_run()
        except TimeoutError:
            raise FleetError(f"not within {deadline_s:.0f} s: {fleet.version} at every peer") from None

    def outcome(self, versions: Sequence[str], state_bytes: int) -> Outcome:
        times, left_out = [], 0
        for version in versions:
            gone = self.gone[version]
            last = max(gone.staged.values())
            share = sum(max(0.0, min(last, end) - max(gone.opened, start)) for start, end in self._anchors) / (
                last - gone.opened
            )
            if 0.0 < share < 0.5:
                left_out += 1
                continue
            times.append(Times(gone.sealed - gone.opened, last - gone.opened, last - gone.published, share > 0))
        return Outcome(times, [end - start for start, end in self._anchors], left_out, state_bytes)
