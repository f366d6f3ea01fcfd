"""MirrorUploader killed before and after every request to a real S3 store, and restarted. Ready artifacts are always
complete, the newest version on the mirror never goes back, and in the end the mirror is current, without expired
objects.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from p2pcast.ground.version import Version
from p2pcast.ground.wakeup import Wakeup
from p2pcast.mirror import requests, upload_plan
from p2pcast.mirror.object_names import run_folder, slice_name, slices, tail_name
from p2pcast.mirror.object_store import Objects
from p2pcast.mirror.requests import ObjectRequest
from p2pcast.process.events import Events
from p2pcast.relay.artifact_path import Edge, cheapest_path
from p2pcast.store import retention
from trainer_node.background import anchors_and_squashes
from trainer_node.background.mirror_uploader import MirrorUploader

T = TypeVar("T")

VERSIONS = 6
AT_LEAST = 80


class Killed(BaseException):
    """Ends a process without any of its error handling."""


class Mortal:
    """Dies at request number ``at`` (from 1): before the request, or after its execution and before the answer. Sends
    no request afterwards.
    """

    def __init__(self, at: int, *, after: bool) -> None:
        self.died_at = ""
        self._at = at
        self._after = after
        self._count = 0

    async def request(self, request: ObjectRequest, do: Callable[[], Awaitable[T]]) -> T:
        self._count += 1
        if self._count < self._at:
            return await do()
        if self._count == self._at:
            if self._after:
                await do()
            kind = request.name.split("/", 2)[2].split("/")[0]
            self.died_at = f"{'after' if self._after else 'before'} {request.what} {kind}"
        raise Killed


async def test_a_mirror_killed_at_any_request_stays_valid_and_catches_up(
    swarm: Any, states: Any, network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anchors_and_squashes, "ANCHOR_EVERY", 2)
    monkeypatch.setattr(retention, "KEEP_DELTAS", 2)
    monkeypatch.setattr(retention, "KEEP_ANCHORS", 1)
    # As if an hour had passed: leftovers of an interrupted removal or upload may be removed.
    monkeypatch.setattr(upload_plan, "LEFT_OVER_S", -1.0)
    state = states.first()
    swarm.publish(0, state)
    hub = await swarm.hub_up(squashes=False)
    await swarm.published("0.0")
    objects = Objects("s3://bucket/kills", run_folder(hub.token.run))
    died, shown, best = Counter[str](), set[str](), None

    async def life(mortal: Mortal) -> bool:
        """True when it was current before it died."""
        mirroring = MirrorUploader(hub.state.store, objects, Events(), lambda: False, Wakeup())
        with requests.watched(mortal):
            task = asyncio.create_task(mirroring.run())
            await swarm.until(lambda: task.done() or mirroring.status()["current"], "it dies or is current")
            task.cancel()
            await asyncio.wait([task])
        assert mirroring.errors == 0
        died[mortal.died_at] += 1
        return not mortal.died_at

    async def look() -> None:
        nonlocal shown, best
        names = {found.name for found in await objects.list()}
        ready = {name for name in names if name.startswith("ready/")}
        if ready != shown:
            shown = ready
            found = await swarm.mirror_holds(objects, hub.state.key.public)
            assert len(found) == len(ready)
            way = cheapest_path(None, [Edge(a, e.base, e.version, e.size) for a, e in found.items()])
            assert best is None or (way and way[-1].version >= best)
            best = way[-1].version if way else None

    for step in range(VERSIONS):
        if step:
            swarm.publish(step, state := states.trained(state, step))
            await swarm.published(f"0.{step}")
        newest = Version(0, step)
        await swarm.until(
            lambda step=step: (
                step % 2 or any(s.base is None and s.version.step == step for s in hub.state.store.artifacts.values())
            ),
            "its anchor is made",
        )
        await life(Mortal(1, after=False))
        while True:
            current = await life(Mortal(2, after=False))
            await look()
            if current:
                break
            await life(Mortal(2, after=True))
            await look()
        assert best == newest
    kept = hub.state.store.artifacts
    expected = {
        "key",
        *(tail_name(a) for a in kept),
        *(slice_name(a, n) for a, s in kept.items() for n in range(slices(s.manifest.log))),
    }
    assert {f.name for f in await objects.list() if not f.name.startswith("ready/")} == expected
    assert {artifact[-32:] for artifact in shown} == {a.hex() for a in kept}
    puts, gone = ("key", "log", "tail", "ready"), ("log", "tail", "ready")
    assert {f"{when} write {kind}" for when in ("before", "after") for kind in puts} <= died.keys()
    assert {f"{when} remove {kind}" for when in ("before", "after") for kind in gone} <= died.keys()
    assert sum(died.values()) - died[""] >= AT_LEAST
    await swarm.peer_up("far", hub=None, mirror=objects.url)
    await swarm.live(f"0.{VERSIONS - 1}")
